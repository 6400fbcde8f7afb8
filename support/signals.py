"""Ctrl-C and SIGTERM: the first stops cleanly, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.02  # seconds after which a signal that was lost is sent again


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
        self.raised: Stopped | None = None
        self._held = False
        self.unraisable = sys.unraisablehook

    def listen(self) -> None:
        """Handle both signals from now on, but none that is ignored, as it is for a job in the
        background of a shell."""
        for each in SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, self)

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
            self.raised = Stopped(self.number)
            raise self.raised

    def dropped(self, unraisable: Any) -> None:
        """The `sys.unraisablehook`: a Stopped that arose where Python drops every exception, in
        the callback of a weak reference or a destructor, is raised again elsewhere."""
        if not isinstance(unraisable.exc_value, Stopped):
            self.unraisable(unraisable)
            return
        number, self.number, self.raised = unraisable.exc_value.number, None, None
        self.listen()
        again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait until `check` is called."""
        self._held = True
        try:
            yield
        finally:
            self._held = False


_first: Stop | None = None  # of those that are open


@contextmanager
def stoppable(kept: Callable[[], str] | None = None) -> Iterator[Stop]:
    """Handle the signals while open, as the one who opened first does; `kept` tells, after a stop,
    what there is and how to go on.

    Compiled libraries, above all while they are imported, may answer a Stopped with an error of
    their own: any error that follows one is taken for it.
    """
    with _handled() as stop:
        try:
            yield stop
        except (Exception, Stopped) as error:
            stopped = error if isinstance(error, Stopped) else stop.raised
            if stopped is None:
                raise
            raise Stopped(stopped.number, kept() if kept else stopped.kept) from None


@contextmanager
def _handled() -> Iterator[Stop]:
    """Outside the main thread no signal is handled: there they never arrive."""
    global _first
    if _first or threading.current_thread() is not threading.main_thread():
        yield _first or Stop()
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _first = Stop()
    try:
        sys.unraisablehook = _first.dropped
        _first.listen()
        yield _first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook, _first = _first.unraisable, None
