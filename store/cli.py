"""`feature-store`: look at stores, check them, copy them."""

from __future__ import annotations

import json
from typing import Any

import click

from store.codecs import CODECS
from store.console import command_errors
from store.errors import StoreError


def _progress(unit: str) -> Any:
    from tqdm import tqdm

    return lambda items: tqdm(items, unit=unit, disable=None)


@click.group()
def main() -> None:
    """Look at feature stores, check them, copy them."""


@main.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for another program.")
@click.option("--partial", is_flag=True, help="Open a store that is still being written.")
@command_errors
def info(path: str, as_json: bool, partial: bool) -> None:
    """What a store holds: teacher, corpus, features, codec, sizes."""
    from store.info import describe, info_lines
    from store.reader import open_store

    store = open_store(path, allow_partial=partial)
    text = json.dumps(describe(store), indent=1) if as_json else "\n".join(info_lines(store))
    click.echo(text)


@main.command()
@click.argument("path")
@command_errors
def verify(path: str) -> None:
    """Read everything and compare it with the manifest; exit code 1 if the store is damaged."""
    from store.verify import verify as check

    report = check(path, progress=_progress("array"))
    for problem in report.problems:
        click.echo(problem)
    if report.problems:
        raise StoreError(
            f"{path}: damaged: {len(report.problems)} problem(s); "
            "restore these files from a copy, or dump again"
        )
    click.echo(
        f"{path}: sound: {report.parts} parts, {report.arrays} arrays, {report.bytes:,} bytes"
    )


@main.command()
@click.argument("source")
@click.argument("target")
@click.option("--codec", type=click.Choice(CODECS), help="Recode to this codec (more error only).")
@command_errors
def convert(source: str, target: str, codec: str | None) -> None:
    """Copy a store to TARGET (.zarr or .h5), perhaps with a smaller codec."""
    from store.convert import convert as copy

    copy(source, target, codec, progress=_progress("part"))
    click.echo(f"{target}: written")


@main.command()
@click.argument("sources", nargs=-1, required=True)
@click.argument("target")
@click.option("--recode", is_flag=True, help="Encode again where the calibration differs.")
@command_errors
def merge(sources: tuple[str, ...], target: str, recode: bool) -> None:
    """Join SOURCES, stores of one teacher that differ in their corpus only, into TARGET."""
    from store.convert import merge as join

    join(sources, target, recode, progress=_progress("part"))
    click.echo(f"{target}: written")


@main.command()
@click.argument("path")
@click.argument("number", type=int)
@click.option("--view", default=0, show_default=True, help="Which view's masks and logits.")
@command_errors
def show(path: str, number: int, view: int) -> None:
    """One sequence: its text, its tokens with their spans, and what the teacher said."""
    from rich.console import Console

    from store.info import record_table
    from store.reader import open_store

    record, table = record_table(open_store(path), number, view)
    console = Console()
    where = f"document {record.document} from character {record.document_begin}"
    console.print(f"sequence {record.index}, {where}", highlight=False)
    console.print(record.text, markup=False, highlight=False)
    console.print(table)
