"""Handle Ctrl-C and SIGTERM: the first signal stops cleanly, the second one exits at once."""

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
AGAIN = 0.02  # seconds after which a dropped signal is sent again


class Stopped(KeyboardInterrupt):
    """Raised after a signal. `message` is one line: what was saved, and how to continue.

    It does not derive from Exception, so that `except Exception` does not catch it.
    """

    def __init__(self, number: int = signal.SIGINT, message: str = "") -> None:
        super().__init__(message)
        self.number, self.message = number, message


class Stop:
    """Handles SIGINT (Ctrl-C) and SIGTERM: raises Stopped at once or, inside `deferred`, at the
    next `check`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.raised: Stopped | None = None
        self._deferred = False
        self.unraisable = sys.unraisablehook

    def listen(self) -> None:
        """Handle SIGINT and SIGTERM from now on, unless the process ignores them."""
        for signum in SIGNALS:
            # A shell sets SIGINT to SIG_IGN for its background jobs: Ctrl-C must not stop them.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for signum in SIGNALS:
            if signal.getsignal(signum) is self:
                signal.signal(signum, signal.SIG_DFL)  # the next signal ends the process
        self.number = number
        if not self._deferred:
            self.check()

    @property
    def requested(self) -> bool:
        return self.number is not None

    def request(self) -> None:
        """Request a stop without a signal, because another process of the job has received one."""
        self.number = self.number or signal.SIGTERM

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.number is not None:
            self.raised = Stopped(self.number)
            raise self.raised

    def dropped(self, unraisable: Any) -> None:
        """Send a signal again if Python discarded the Stopped that it raised. Used as
        `sys.unraisablehook`."""
        # Python drops every exception in a destructor or in the callback of a weak reference.
        if not isinstance(unraisable.exc_value, Stopped):
            self.unraisable(unraisable)
            return
        number, self.number, self.raised = unraisable.exc_value.number, None, None
        self.listen()
        # Sent later, by a thread: Python would also drop an exception that is raised here.
        again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay Stopped until `check` is called."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


_first: Stop | None = None  # the handler of the outermost open context


@contextmanager
def stoppable(message: Callable[[], str] | None = None) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM while the context is open.

    After a stop, `message` returns the line of the Stopped that is raised: what was saved, and how
    to continue. Inside another such context, the outer handler stays in place.
    """
    with _handled() as stop:
        try:
            yield stop
        except (Exception, Stopped) as error:
            # A compiled library may convert Stopped into another error, above all while it is
            # imported: any error after a stop counts as the stop.
            stopped = error if isinstance(error, Stopped) else stop.raised
            if stopped is None:
                raise
            raise Stopped(stopped.number, message() if message else stopped.message) from None


@contextmanager
def _handled() -> Iterator[Stop]:
    """Install the handler, and restore the previous handlers at the end."""
    global _first
    # Python delivers signals to the main thread only: in another thread no handler is installed.
    if _first or threading.current_thread() is not threading.main_thread():
        yield _first or Stop()
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    _first = Stop()
    try:
        sys.unraisablehook = _first.dropped
        _first.listen()
        yield _first
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook, _first = _first.unraisable, None
