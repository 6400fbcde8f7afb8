"""Print the results of a command: lines and tables for people, JSON for programs."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from teachonce.support.console import command_errors, readable, wide_console
from teachonce.support.redaction import redacted

# Progress goes to stderr: with --json, stdout is one JSON object.
say = functools.partial(click.echo, err=True)


@dataclass(frozen=True)
class Output:
    """Holds a result of a command.

    facts: the result for programs, as JSON. lines: the same for people, as text and as tables of
    rich; they are generated only if they are printed.
    """

    facts: Mapping[str, Any]
    lines: Iterable[Any]


def printed(command: Callable[..., Iterator[Output]]) -> Callable[..., None]:
    """Decorate a click callback that yields outputs: print them, and report an error in one line.

    Lines are printed when they are yielded. With `--json` the facts of all outputs are printed as
    one object at the end, even after an error.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON for another program.")
    @command_errors
    @functools.wraps(command)
    def run(as_json: bool, **arguments: Any) -> None:
        facts = dict[str, Any]()
        try:
            for output in command(**arguments):
                # The path of a store may be a URL with a password.
                facts |= redacted(dict(output.facts))
                for part in () if as_json else output.lines:
                    echo = click.echo if isinstance(part, str) else wide_console().print
                    echo(redacted(part))
        finally:  # `verify` yields its report before it raises: programs need it most then
            if as_json and facts:
                click.echo(json.dumps(_finite(facts), indent=1, allow_nan=False))

    return run


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bars(items: Sequence[Any], unit: str) -> Any:
    """Iterate over items with a progress bar, if stderr is a terminal."""
    from tqdm.auto import tqdm

    return tqdm(items, unit=unit, disable=None)  # None: no bar without a terminal


def written(path: str) -> Output:
    """Open a store that was just written, and return its sizes."""
    from teachonce.store.read.store import open_store
    from teachonce.store.tools.info import bytes_on_disk

    store, size = open_store(path), bytes_on_disk(path)
    line = f"{path}: {store.counts_line()}, codec {store.features.codec}" + (
        f", {readable(size['total'])}" if size else ""
    )
    facts = {key: store.meta[key] for key in ("sequences", "tokens", "parts")}
    facts |= {"path": path, "codec": store.features.codec, "bytes_on_disk": size}
    return Output(facts | {"content": store.manifest.content()}, [line])
