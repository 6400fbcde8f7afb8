"""Ctrl-C and SIGTERM: the first stops cleanly, the second leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal has asked to stop; `kept` says in a line what there is and how to go on.

    No Exception: what handles errors must not handle this.
    """

    def __init__(self, number: int = signal.SIGINT, kept: str = "") -> None:
        super().__init__(kept)
        self.number, self.kept = number, kept


class Stop:
    """The handler of both signals: raises Stopped at once, or by `check` where work is held."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._held = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            if signal.getsignal(each) is self:
                signal.signal(each, signal.SIG_DFL)  # the next one ends the process
        self.number = number
        if not self._held:
            self.check()

    @property
    def asked(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Raise Stopped if there was a signal."""
        if self.number is not None:
            raise Stopped(self.number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait until `check` is called."""
        self._held = True
        try:
            yield
        finally:
            self._held = False


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Handle the signals while open, as the one who opened first does.

    Outside the main thread none is handled: there they never arrive.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    active = [handler for handler in before.values() if isinstance(handler, Stop)]
    if active or threading.current_thread() is not threading.main_thread():
        yield active[0] if active else Stop()
        return
    stop = Stop()
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as for a job in the background of a shell
            signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
