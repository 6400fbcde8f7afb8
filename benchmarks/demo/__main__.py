"""Search over Python's documentation by the embedded teacher and by a small student of it.

`make demo` runs it; `--ask` asks further questions of what it made.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from pathlib import Path

import click

from benchmarks.demo.searching import Settings, demo, load
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError

SHOWN = 3  # questions whose passages are printed


def _offline_without_hub() -> None:
    """Set the hub's client offline if the hub cannot be reached: otherwise it retries for half a
    minute at each request."""
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def to_ask_more(settings: Settings) -> str:
    """Return the command that searches a finished demo for a question."""
    given = {"--out": (settings.out, Settings.out), "--model": (settings.model, Settings.model)}
    args = [str(w) for name, (v, default) in given.items() if v != default for w in (name, v)]
    command = shlex.join([".venv/bin/python", "-m", "benchmarks.demo", *args])
    return f'{command} --ask "a question"'


@click.command(context_settings=CONTEXT)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Settings.out,
    help="The folder.",
)
@click.option("--model", default=Settings.model, help="The teacher; with --ask the same again.")
@click.option("--student", default=Settings.student, help="The kind and size of the student.")
@click.option("--epochs", default=Settings.epochs, help="Passes of the training over the passages.")
@click.option("--ask", multiple=True, help="Ask this of a finished demo. Repeatable.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the tables into this .svg, too.",
)
@command_errors
def main(
    out: Path, model: str, student: str, epochs: float, ask: tuple[str, ...], picture: Path | None
) -> None:
    """Dump the embedded teacher, train a student of its vectors, search Python's documentation by
    both."""
    started = time.perf_counter()
    if not all(map(str.strip, ask)):
        raise UserError("--ask: expected a question, got an empty one")
    _offline_without_hub()
    from rich.console import Console
    from transformers.utils import logging

    from benchmarks.demo.passages import QUESTIONS
    from benchmarks.demo.report import show_answers, show_models

    logging.disable_progress_bar()  # of reading weights, before an answer

    settings = Settings(out=out, model=model, student=student, epochs=epochs)
    search = load(settings) if ask else demo(settings)
    console = Console(record=picture is not None)
    show_answers(search, ask or QUESTIONS[:SHOWN], console)
    if not ask:
        show_models(search.compared(), len(search.passages), console)
        click.echo(f"{time.perf_counter() - started:.0f} s; ask more: {to_ask_more(settings)}")
    if picture is not None:
        console.save_svg(str(picture), title="teachonce")


if __name__ == "__main__":
    main()
