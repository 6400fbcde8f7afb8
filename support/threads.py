"""How threads wait that torch starts, where torch is imported for names of these packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.environment import variable

VARIABLE, SLEEPING = "OMP_WAIT_POLICY", "PASSIVE"


@contextmanager
def sleeping_waits() -> Iterator[None]:
    """Let the threads of a torch that is first imported within sleep while they wait.

    Spinning threads take the cores from those that prepare batches, and make small students several
    times slower. OpenMP reads the setting once, as torch loads it. It leaves nothing behind:
    neither the environment of this process nor that of others is changed afterwards. A torch that
    is there already, and a setting that is, stay as they are.
    """
    if "torch" in sys.modules:
        yield
        return
    with variable(VARIABLE, os.environ.get(VARIABLE, SLEEPING)):
        yield
