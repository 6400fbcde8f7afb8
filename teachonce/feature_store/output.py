"""What a command prints: lines and tables for people, with `--json` facts for programs."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from teachonce.support.console import command_errors, counted, readable, wide_console
from teachonce.support.redaction import redacted


@dataclass(frozen=True)
class Output:
    """What a command prints: its facts for programs; for people, lines of text and tables of rich.

    `lines` are made only if they are printed.
    """

    facts: Mapping[str, Any]
    lines: Iterable[Any]


def printed(command: Callable[..., Iterator[Output]]) -> Callable[..., None]:
    """Decorate a click callback that yields outputs: print them, and end an error with one line.

    Lines are printed as they come. With `--json` the facts of all outputs are one object, which is
    printed at the end, also if an error follows.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON for another program.")
    @command_errors
    @functools.wraps(command)
    def run(as_json: bool, **arguments: Any) -> None:
        facts = dict[str, Any]()
        try:
            for output in command(**arguments):
                facts |= redacted(dict(output.facts))
                for part in () if as_json else output.lines:
                    echo = click.echo if isinstance(part, str) else wide_console().print
                    echo(redacted(part))
        finally:
            if as_json and facts:
                click.echo(json.dumps(_finite(facts), indent=1, allow_nan=False))

    return run


def _finite(value: Any) -> Any:
    """Write null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress(unit: str) -> Any:
    """Make a function that shows a bar while it goes through items."""
    from tqdm import tqdm

    return lambda items: tqdm(items, unit=unit, disable=None)


def bars(items: Sequence[Any], unit: str) -> Any:
    """Go through items with a bar."""
    return progress(unit)(items)


def written(path: str) -> Output:
    """Tell what a store that was written holds."""
    from teachonce.store.read.store import open_store
    from teachonce.store.tools.info import bytes_on_disk

    store, size = open_store(path), bytes_on_disk(path)
    line = (
        f"{path}: {counted(len(store), 'sequence')}, {counted(store.meta['tokens'], 'token')}, "
        f"codec {store.features.codec}" + (f", {readable(size['total'])}" if size else "")
    )
    facts = {key: store.meta[key] for key in ("sequences", "tokens", "parts")}
    facts |= {"path": path, "codec": store.features.codec, "bytes_on_disk": size}
    return Output(facts | {"content": store.manifest.content()}, [line])
