"""Console output and error handling that the commands of all packages share."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from teachonce.support.environment import SLEEPING, VARIABLE
from teachonce.support.errors import (
    UserError,
    first_line,
    library_error_line,
    os_error_line,
    out_of_memory,
)
from teachonce.support.signals import SIGNALS, Stopped, stoppable

if TYPE_CHECKING:
    from rich.console import Console

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

DEVICES = ("auto", "cpu", "cuda")  # completions of --device, which also accepts cuda:N
WIDE = 200  # columns of a table that is printed to a file or another program
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}
"""click's context settings of every command; a group passes them on to its subcommands."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1: `1 part`, `1,204 parts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable(size: float) -> str:
    """Return a size in bytes for people: `812 B`, `43 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        # From 999.5 on, three digits would be printed as 1e+03.
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def wide_console() -> Console:
    """Return rich's console for tables, with the width of the terminal; for a file or pipe, with at
    least WIDE columns."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console


def takes_option(name: str) -> bool | None:
    """Return whether the running command has an option with this name; None if no command runs, as
    in a call from Python."""
    context = click.get_current_context(silent=True)
    if context is None:
        return None
    return any(param.name == name for param in context.command.params)


def check_device(device: str, gpus: int | None = None) -> None:
    """Raise UserError if `--device` has an unknown name, or names a GPU beyond the `gpus` of this
    machine.

    `gpus` is None if they were not counted, because counting imports torch.
    """
    if device == "auto" and gpus is None:
        return
    match = re.fullmatch(r"(cpu|cuda)(?::([0-9]+))?", device)
    if not match:
        raise UserError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    if gpus is not None and match[1] == "cuda" and int(match[2] or 0) >= gpus:
        raise UserError(
            f"--device {device}: this machine has {counted(gpus, 'CUDA device')}; use --device cpu"
        )


def command_errors(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a click callback so that errors and signals end it with one line.

    A UserError or OSError is printed to stderr, with exit code 1. Ctrl-C and SIGTERM have exit
    codes 130 and 143.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # Let waiting threads of OpenMP sleep: on a machine with other work, spinning threads make
        # small students ten times slower. OpenMP reads the variable when torch is first imported.
        os.environ.setdefault(VARIABLE, SLEEPING)
        # A name may have characters that the encoding of the terminal lacks.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        if sys.flags.optimize > 1:
            raise click.ClickException(
                "Python runs with -OO (or PYTHONOPTIMIZE=2), which removes the docstrings that"
                " transformers needs; run it without -OO"
            )
        try:
            with stoppable():
                return command(*args, **kwargs)
        except UserError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our pipe has ended: click exits quietly
                raise
            raise click.ClickException(os_error_line(error)) from error
        except Exception as error:
            line = library_error_line(error)
            if out_of_memory(error):
                line = (
                    f"out of memory ({first_line(error)}); close other programs, or process less at"
                    " once: smaller batches, shorter sequences"
                )
            if line is None:
                raise
            raise click.ClickException(line) from error
        except KeyboardInterrupt as error:
            stopped = error if isinstance(error, Stopped) else Stopped()
            # From here on a second signal ends the process at once, without a traceback.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            click.echo(f"Stopped: {stopped.message or 'run the same command again'}", err=True)
            raise click.exceptions.Exit(128 + stopped.number) from None

    return run
