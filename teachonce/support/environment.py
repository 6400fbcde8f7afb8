"""Variables of the environment: one that is set for a while, and those that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment within; afterwards it is what it was, or gone."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def leads() -> bool:
    """Tell whether this process is the one that speaks and writes: the first of those that
    `torchrun` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"
