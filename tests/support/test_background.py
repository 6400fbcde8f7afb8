"""Threads that work before and after their caller: prefetching and writing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from teachonce.support import background
from teachonce.support.background import BackgroundCalls, in_order, prefetched
from teachonce.support.errors import UserError


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
