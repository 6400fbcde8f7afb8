"""Memory of what goes through a whole store, against the number of its parts.

    python -m benchmarks.speed.tool_memory [--most N]

The parts are small and many: what grows with their number is the bookkeeping of the tools. Nothing
waits for the disk, as memory alone is told. Each figure is of a process of its own.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import click

from benchmarks.common import synthetic
from benchmarks.common.interleaved import Figures, alone, peak_memory
from benchmarks.common.results import RESULTS, publish, table
from benchmarks.speed.growth import many_parts
from teachonce.store import open_store
from teachonce.support.console import command_errors

TOLD = (
    "`python -m benchmarks.speed.tool_memory`; MB: the most that the process held, libraries"
    " included. Synthetic Zarr stores of equal parts of a few sequences; the second store of"
    " `merge` has a hundred parts."
)


def verified(path: Path) -> None:
    """Check a store."""
    from teachonce.store.tools.verify import verify

    assert not verify(path).problems


def converted(path: Path) -> None:
    """Copy a store."""
    from teachonce.store.tools.copy import convert

    convert(path, path.with_name("copy.zarr"))


def merged(path: Path) -> None:
    """Join a store with a small one."""
    from teachonce.store.tools.merge import merge

    merge([path, path.with_name("other.zarr")], path.with_name("copy.zarr"))


def hashed(path: Path) -> None:
    """Tell which values a store holds."""
    with closing(open_store(path)) as store:
        store.manifest.content()


def tokenised(path: Path) -> None:
    """Take a store's text in other tokens, and count them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    from teachonce.student_train.data.token_cache import token_table

    words = {word: number for number, word in enumerate(["[UNK]", *synthetic.WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    cache = {"TEACHONCE_CACHE": str(path.with_name("cache"))}
    with closing(open_store(path)) as store, mock.patch.dict("os.environ", cache):
        token_table(store, tokenizer).counts(len(words))


WORKS: dict[str, Callable[[Path], None]] = {
    "verify": verified,
    "convert": converted,
    "merge": merged,
    "content": hashed,
    "tokens of a student": tokenised,
}


def memory(path: Path, work: Callable[[Path], None]) -> Figures:
    """Do a work, and tell the most memory that it held."""
    with mock.patch("os.fsync", lambda _: None):  # a Mock keeps every call
        work(path)
    return {"memory": peak_memory()}


def rows(folder: Path, most: int) -> list[list[object]]:
    """A row for each number of parts."""
    found: list[list[object]] = []
    many_parts(folder / "other.zarr", 100)
    for parts in itertools.takewhile(lambda n: n <= most, (100, 1000, 10_000)):
        path = folder / f"{parts}-parts.zarr"
        many_parts(path, parts)
        cells = list[object]()
        for work in WORKS.values():
            cells.append(f"{alone(partial(memory, path, work))['memory']:,.0f}")
            shutil.rmtree(folder / "copy.zarr", ignore_errors=True)
        found.append([f"{parts:,}", *cells])
    return found


@click.command()
@click.option("--most", default=10_000, help="Parts of the largest store.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(most: int, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        body = table(("parts", *(f"{work}, MB" for work in WORKS)), rows(Path(name), most))
        publish("Memory of the tools", TOLD, body, results)


if __name__ == "__main__":
    main()
