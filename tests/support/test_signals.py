"""Signals that reach Python or a library at a bad moment still stop the command."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from teachonce.support.signals import SIGNALS, Stopped, stoppable


class Thing:
    pass


def drop_in_a_destructor(number: signal.Signals) -> None:
    class Last:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Last()


def drop_in_a_callback(number: signal.Signals) -> None:
    thing = Thing()
    seen = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert seen() is None


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("drop", [drop_in_a_destructor, drop_in_a_callback])
def test_a_signal_that_python_drops_comes_again(
    number: signal.Signals,
    drop: Callable[[signal.Signals], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sys.unraisablehook, signal.getsignal(number)
    with pytest.raises(Stopped, match="^as it was$") as stopped, stoppable(lambda: "as it was"):
        drop(number)
        time.sleep(20)
    assert stopped.value.number == number
    assert (sys.unraisablehook, signal.getsignal(number)) == before
    assert capfd.readouterr().err == ""


def test_a_dropped_signal_waits_where_work_is_held() -> None:
    with stoppable() as stop, stop.deferred():
        drop_in_a_destructor(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        with stoppable() as inner, pytest.raises(Stopped):
            inner.check()


@pytest.mark.parametrize("kept", ["", "all of it"])
def test_an_error_that_a_library_makes_of_a_stop(kept: str) -> None:
    with pytest.raises(Stopped) as stopped, stoppable((lambda: kept) if kept else None):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise ImportError("could not be initialised") from None
    assert (stopped.value.number, stopped.value.message) == (signal.SIGTERM, kept)


def test_an_error_without_a_stop_is_itself() -> None:
    with pytest.raises(ImportError), stoppable(lambda: "nothing"):
        raise ImportError
    with pytest.raises(OSError), stoppable() as stop, stop.deferred():  # such as a full disk
        signal.raise_signal(signal.SIGINT)
        raise OSError


def test_an_inner_word_of_what_is_kept_is_not_lost() -> None:
    with pytest.raises(Stopped, match="^inner$"), stoppable(), stoppable(lambda: "inner"):
        signal.raise_signal(signal.SIGINT)
