"""A process that dies at a rename, or before it seals a store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from teachonce.store import StoreWriter, UserError
from teachonce.support import files

rename = files.rename


class Killed(BaseException):
    """No handler catches this exception, as none catches SIGKILL."""


def dies_at(number: int, *, done: bool) -> Callable[[Path, Path], None]:
    """Return a `files.rename` that raises Killed at call `number`, before or after the rename."""
    calls = 0

    def stop(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls < number or done:
            rename(source, target)
        if calls == number:
            raise Killed

    return stop


@contextmanager
def unsealed() -> Iterator[None]:
    """Stop before the seal: the store has all of its parts, but is not finished."""

    def seal(writer: StoreWriter) -> None:
        raise UserError("killed before the seal")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="before the seal"):
        patch.setattr(StoreWriter, "seal", seal)
        yield
