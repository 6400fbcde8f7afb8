"""A process that dies at a rename."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from teachonce.support import files

rename = files.rename


class Killed(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


def dies_at(number: int, *, done: bool) -> Callable[[Path, Path], None]:
    """`files.rename` that raises Killed at its `number`-th call, after the deed or before it."""
    calls = 0

    def stop(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls < number or done:
            rename(source, target)
        if calls == number:
            raise Killed

    return stop
