"""Threads beside their caller, processes with limits, and signals.

- Threads that work before and after their caller: prefetching and writing.
- Functions in a process with limits: results, errors, and what happens beyond a limit.
- Signals that reach Python or a library at a bad moment still stop the command.
"""

import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from teachonce.support import background
from teachonce.support.background import BackgroundCalls, in_order, prefetched
from teachonce.support.bounded import LimitExceeded, run_bounded
from teachonce.support.errors import UserError
from teachonce.support.signals import SIGNALS, Stopped, stoppable


def test_prefetching_gives_the_items_in_order_and_raises_their_errors() -> None:
    assert list(prefetched(range(50), 3)) == list(range(50))

    def failing() -> Iterator[int]:
        yield 1
        raise UserError("no more")

    items = prefetched(failing(), 3)
    assert next(items) == 1
    with pytest.raises(UserError, match="no more"):
        next(items)


def test_prefetching_stops_when_it_is_closed() -> None:
    made: list[int] = []
    items = prefetched((made.append(i) or i for i in range(10_000)), 2)  # type: ignore[func-returns-value]
    next(items)
    items.close()
    assert len(made) < 10


def test_work_in_threads_comes_in_order_and_little_of_it_is_under_way() -> None:
    taken: list[int] = []
    items = (taken.append(i) or i for i in range(1000))  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(3) as threads:
        found = in_order(threads, lambda number: number * 2, items, 6)
        assert [next(found) for _ in range(10)] == list(range(0, 20, 2))
        assert len(taken) < 20
        assert list(found) == list(range(20, 2000, 2)) and len(taken) == 1000
        with pytest.raises(ZeroDivisionError):
            list(in_order(threads, lambda number: 1 // number, [1, 0], 6))


def test_calls_are_made_in_order_by_another_thread() -> None:
    made: list[int] = []
    threads = set()

    def work(number: int) -> None:
        threads.add(threading.current_thread())
        made.append(number)

    with BackgroundCalls(2) as behind:
        for number in range(50):
            behind.call(work, number)
        behind.finish()
        assert made == list(range(50))
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_no_more_calls_wait_than_may() -> None:
    gate, made = threading.Event(), list[int]()

    def work(number: int) -> None:
        gate.wait(60)
        made.append(number)

    with BackgroundCalls(2) as behind:
        for number in range(3):  # one is running, two wait
            behind.call(work, number)
        waits = threading.Thread(target=behind.call, args=(work, 3), daemon=True)
        waits.start()
        waits.join(0.2)
        assert waits.is_alive() and made == []
        gate.set()
        waits.join(60)
        assert not waits.is_alive()
    assert made == [0, 1, 2, 3]


def test_an_error_is_raised_and_what_follows_is_left_out() -> None:
    made: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise UserError("a full disk")
        made.append(number)

    for calls in (2, 20):  # raised at the end, or at the next call if that is earlier
        made.clear()
        with pytest.raises(UserError, match="a full disk"), BackgroundCalls(2) as behind:
            for number in range(calls):
                behind.call(work, number)
            behind.finish()
        assert made == [0]


def test_what_waits_is_made_when_the_caller_fails() -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt), BackgroundCalls(5) as behind:
        for number in range(4):
            behind.call(made.append, number)
        raise KeyboardInterrupt
    assert made == [0, 1, 2, 3]


def test_an_error_that_meets_a_stop_is_reported() -> None:
    printed: list[str] = []

    def full() -> None:
        raise UserError("a full disk")

    with pytest.raises(KeyboardInterrupt), BackgroundCalls(5, printed.append) as behind:
        behind.call(full)
        raise KeyboardInterrupt
    assert printed == ["Error: a full disk"]
    with (
        pytest.raises(UserError, match="a full disk"),
        BackgroundCalls(5, printed.append) as behind,
    ):
        behind.call(full)
        behind.finish()
    assert len(printed) == 1  # raised already, so whoever catches it reports it


def test_a_stop_is_not_kept_waiting_by_an_item_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.2)
    comes = threading.Event()

    def stalled() -> Iterator[int]:
        yield 1
        comes.wait(60)
        yield 2

    items = prefetched(stalled(), 1)
    assert next(items) == 1
    items.close()
    assert not comes.is_set()
    comes.set()


MEMORY = 3 << 30  # more than any function here takes, except `fill`


def add(one: int, other: int) -> dict[str, int]:
    print("what a library prints is no answer")
    return {"sum": one + other}


def refuse() -> None:
    raise UserError("a line for a person")


def fail() -> None:
    raise KeyError("of the code")


def spin() -> None:
    while True:
        pass


def fill() -> int:
    return len([bytearray(1 << 24) for _ in range(1 << 12)])


def crash() -> None:
    os.abort()


def exit_early() -> None:
    raise SystemExit(3)


def answer_a_list() -> None:
    for number in range(3, 9):  # one is the pipe for the result
        with suppress(OSError):
            os.write(number, b"[]")
    os._exit(0)


def test_results_and_errors_come_back() -> None:
    assert run_bounded(add, 1, 2, seconds=20, memory=MEMORY) == {"sum": 3}
    for function, line in ((refuse, "a line for a person"), (fail, "'of the code'")):
        with pytest.raises(UserError, match=line) as error:
            run_bounded(function, seconds=20, memory=MEMORY)
        assert not isinstance(error.value, LimitExceeded)


def test_time_has_a_bound() -> None:
    started = time.monotonic()
    with pytest.raises(LimitExceeded, match="took longer than 1 s"):
        run_bounded(spin, seconds=1, memory=MEMORY)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("function", [fill, crash, exit_early, answer_a_list])
def test_memory_has_a_bound_and_a_crash_is_a_line(function: object) -> None:
    with pytest.raises(UserError) as error:
        run_bounded(function, seconds=20, memory=1 << 30)  # type: ignore[arg-type]
    if function is not exit_early:
        assert isinstance(error.value, LimitExceeded)
        assert "crashed, or needed more than 1 GB of memory" in str(error.value)


def test_a_system_without_a_bound_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If setrlimit refuses to limit memory, as on macOS, the function runs without a limit."""
    (tmp_path / "resource.py").write_text(
        "RLIMIT_CORE, RLIMIT_CPU, RLIMIT_AS = range(3)\n"
        "def setrlimit(which, bounds):\n    if which == RLIMIT_AS:\n        raise ValueError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run_bounded(math.gcd, 12, 18, seconds=20, memory=MEMORY) == 6


def test_arguments_are_values_of_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_bounded(add, object(), 2, seconds=20, memory=MEMORY)


def test_the_current_folder_brings_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run_bounded(add, 1, 2, seconds=20, memory=MEMORY) == {"sum": 3}
    assert not (tmp_path / "ran").exists()


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
