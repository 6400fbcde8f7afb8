"""Variables of the environment: set for a while, of torchrun, and how torch's threads wait."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE, SLEEPING = "OMP_WAIT_POLICY", "PASSIVE"
_told = False  # torch was imported while its threads were told to sleep


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment within the block, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def is_main_process() -> bool:
    """Return whether this process prints and writes: the first that `torchrun` started, or the only
    one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def sleeping_waits() -> Iterator[None]:
    """Let the threads of a torch that is first imported within sleep while they wait.

    Spinning threads take the cores from those that prepare batches, and make small students several
    times slower. OpenMP reads the setting once, as torch loads it. It leaves nothing behind:
    neither the environment of this process nor that of others is changed afterwards. A torch that
    is there already, and a setting that is, stay as they are.
    """
    global _told
    if "torch" in sys.modules:
        yield
        return
    with variable(VARIABLE, os.environ.get(VARIABLE, SLEEPING)):
        yield
    _told = "torch" in sys.modules


def warn_of_spinning(threads: int) -> None:
    """Warn, in the name of the caller's caller, where several threads of torch may spin while they
    wait: nothing told them to sleep when torch was imported."""
    if threads > 1 and not _told and VARIABLE not in os.environ:
        warnings.warn(
            f"torch was imported before teachonce, and its {threads} threads spin while they wait,"
            " which slows small students down: set OMP_WAIT_POLICY=PASSIVE, or import what you use"
            " of teachonce first",
            RuntimeWarning,
            stacklevel=3,
        )
