"""Memory that a training on a CPU holds and does not need: compiled primitives and freed blocks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from teachonce.support.environment import variable

VARIABLE, PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"
EVERY = 5  # steps between two times that freed blocks are given back


@contextmanager
def few_primitives() -> Iterator[None]:
    """Let oneDNN keep 64 compiled primitives, where it would keep 1,024.

    Batches have many shapes, and each needs primitives of its own, of a megabyte or so. oneDNN
    reads the setting when it compiles the first. One that is there already stays as it is, and
    afterwards the environment is as it was.
    """
    with variable(VARIABLE, os.environ.get(VARIABLE, PRIMITIVES)):
        yield


def give_back() -> None:
    """Return freed memory to the system: glibc keeps gigabytes of blocks whose sizes vary."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
