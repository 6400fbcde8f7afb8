"""Handle Ctrl-C and SIGTERM: the first stops cleanly, the second leaves at once."""

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
    """A signal asked to stop; `kept` says in a line what is kept and how to go on.

    It is no Exception, so that code that handles errors lets it pass.
    """

    def __init__(self, number: int = signal.SIGINT, kept: str = "") -> None:
        super().__init__(kept)
        self.number, self.kept = number, kept


class Stop:
    """Handler of both signals: raises Stopped at once, or at the next `check` inside `held`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.raised: Stopped | None = None
        self._held = False
        self.unraisable = sys.unraisablehook

    def listen(self) -> None:
        """Handle both signals from now on, except an ignored one: a shell ignores Ctrl-C for its
        background jobs."""
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

    def ask(self) -> None:
        """Ask to stop, as a signal does that has not come to this process."""
        self.number = self.number or signal.SIGTERM

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.number is not None:
            self.raised = Stopped(self.number)
            raise self.raised

    def dropped(self, unraisable: Any) -> None:
        """Send a signal again whose Stopped was lost; serves as `sys.unraisablehook`.

        Python drops every exception in a destructor or in the callback of a weak reference.
        """
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
        """Make signals wait until `check` is called."""
        self._held = True
        try:
            yield
        finally:
            self._held = False


_first: Stop | None = None  # of those that are open


@contextmanager
def stoppable(kept: Callable[[], str] | None = None) -> Iterator[Stop]:
    """Handle both signals while the context is open; `kept` tells after a stop what is kept and how
    to go on.

    Inside another such context the outer handler stays. A compiled library may answer Stopped with
    an error of its own, above all while it is imported, so any error after a stop counts as the
    stop.
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
    """Install the handler, and restore the old ones at the end; outside the main thread, where
    signals never arrive, nothing is installed."""
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
