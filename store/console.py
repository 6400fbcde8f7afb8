"""What the commands of all packages share on the command line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from store.errors import UserError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def command_errors(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turn a UserError of a click callback into one line on stderr and exit code 1.

    Before that, OpenMP is told to wait asleep: on a machine with other work its spinning threads
    make small students ten times slower. It reads the setting when torch is first imported.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            return command(*args, **kwargs)
        except UserError as error:
            raise click.ClickException(" ".join(str(error).split())) from error

    return run
