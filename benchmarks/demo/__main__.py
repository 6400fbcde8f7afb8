"""A student trained with a teacher's dump beside an equal one without, in a few minutes.

`make demo` runs it.

The two students are equal in all but the loss: size, vocabulary, start, text, masks, seed, steps.
They are compared with the teacher, and with the start that both have, on paragraphs of the corpus
that come after the dumped ones.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.demo.compare import Settings, demo
from support.console import command_errors


def _offline_without_hub() -> None:
    """Tell the hub's client when the hub cannot be reached: it would try for half a minute at each
    look-up."""
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Settings.out,
    help="The folder.",
)
@click.option("--tokens", default=Settings.tokens, help="Tokens that the teacher reads.")
@click.option("--steps", default=Settings.steps, help="Training steps of each student.")
@command_errors
def main(**arguments: Any) -> None:
    """Dump the embedded teacher, train two students, print and draw the comparison."""
    begun = time.perf_counter()
    _offline_without_hub()
    from benchmarks.demo.table import show

    settings = Settings(**arguments)
    comparison = demo(settings)
    show(comparison)
    picture = f"; the picture: {settings.picture}" if settings.picture.exists() else ""
    click.echo(f"{time.perf_counter() - begun:.0f} s{picture}")


if __name__ == "__main__":
    main()
