"""Environment variables: sets them temporarily, reads torchrun's, and makes waiting threads of
torch sleep."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from teachonce.support.errors import UserError

VARIABLE, SLEEPING = "OMP_WAIT_POLICY", "PASSIVE"
_imported_sleeping = False  # whether torch was imported inside `passive_waits`


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the `with` block, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def torchrun_number(name: str, default: int) -> int:
    """Return the number in a variable of torchrun: RANK, LOCAL_RANK or WORLD_SIZE; `default` if it
    is empty or not set. Raises UserError if it is not a number."""
    word = os.environ.get(name) or str(default)
    # Not `isdigit`, which accepts superscripts that `int` refuses.
    if not word.isdecimal():
        raise UserError(
            f"environment variable {name}={word}: expected a whole number, as torchrun sets it;"
            f" start the command with torchrun, or `unset {name}`"
        )
    return int(word)


def check_torchrun() -> None:
    """Raise UserError if a variable of torchrun is not a number: otherwise libraries would raise
    ValueError."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        torchrun_number(name, 0)


def check_one_process(work: str) -> None:
    """Raise UserError if torchrun started several processes: each would do the whole `work`."""
    check_torchrun()
    if (count := torchrun_number("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"{work} runs in one process, and WORLD_SIZE is {count}; start it without torchrun, or"
            " `unset WORLD_SIZE`"
        )


def is_main_process() -> bool:
    """Return whether this process prints and writes: the only process, or rank 0 of `torchrun`."""
    # By torchrun's variable, because commands call this before torch is imported.
    return torchrun_number("RANK", 0) == 0


@contextmanager
def passive_waits() -> Iterator[None]:
    """Set OMP_WAIT_POLICY=PASSIVE while torch may be imported; restore the environment afterwards.

    Does nothing if torch is imported already, or if the variable is set.
    """
    # Spinning threads take the cores from the threads that prepare batches, and make the training
    # of small students several times slower. OpenMP reads the variable once, when torch loads it.
    global _imported_sleeping
    if "torch" in sys.modules:
        yield
        return
    with variable(VARIABLE, os.environ.get(VARIABLE, SLEEPING)):
        yield
    _imported_sleeping = "torch" in sys.modules


def warn_of_spinning(threads: int) -> None:
    """Issue a RuntimeWarning if several threads of torch may spin while they wait. The warning
    names the line that called this function's caller."""
    if threads > 1 and not _imported_sleeping and VARIABLE not in os.environ:
        warnings.warn(
            f"torch was imported before teachonce, and its {threads} threads spin while they wait,"
            " which slows small students down: set OMP_WAIT_POLICY=PASSIVE, or import what you use"
            " of teachonce first",
            RuntimeWarning,
            stacklevel=3,
        )
