"""Run work in a thread: prefetch items, or make calls while the caller continues."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

from teachonce.support.errors import first_line

Item = TypeVar("Item")
Result = TypeVar("Result")
PATIENCE = 10.0  # seconds to wait for the thread after its consumer has stopped


def prefetched(items: Iterable[Item], ready: int) -> Generator[Item]:
    """Yield the items, which a thread iterates over, at most `ready` items ahead.

    An error of the iteration is raised here. Close the generator to stop the thread.
    """
    slots: queue.Queue[tuple[str, object]] = queue.Queue(ready)
    stop = threading.Event()

    def put(kind: str, value: object) -> None:
        while not stop.is_set():
            try:
                # With a timeout: `put` alone would wait for ever once nobody takes the items.
                slots.put((kind, value), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:  # raised again in the thread of the reader
            put("error", error)

    # A daemon: after PATIENCE, a thread that still waits for the network must not keep the process
    # from ending.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = slots.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "end":
                return
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        while not slots.empty():
            slots.get_nowait()  # wakes a thread that waits for a free slot
        thread.join(PATIENCE)  # not for ever: the thread may wait for a stalled network


def in_order(
    threads: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ready: int
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order, with at most `ready` items in progress."""
    # Not ThreadPoolExecutor.map: it submits all items at once.
    under_way = deque[Future[Result]]()
    for item in items:
        under_way.append(threads.submit(work, item))
        if len(under_way) >= ready:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


class Calls(Protocol):
    """Declares `call` of `BackgroundCalls`, which makes calls in order in another thread."""

    def call(self, work: Callable[..., object], *arguments: Any) -> None:
        """Queue a call."""


class BackgroundCalls:
    """Makes calls in one thread, in order, while the caller continues; at most `waiting` calls wait
    to be started.

    An error of a call is raised by the next `call` or `finish`, and later calls are skipped. The
    end of the `with` block waits for all calls. If the block ends by another error or a stop, an
    error of a call is not raised, but passed to `say` as a line.
    """

    def __init__(self, waiting: int, say: Callable[[str], object] = lambda line: None) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(int)  # starts the thread now: later, memory may not suffice
        self._waiting, self._calls = waiting, deque[Future[None]]()
        self._say = say
        self._failure: BaseException | None = None

    def call(self, work: Callable[..., object], *arguments: Any) -> None:
        """Queue a call; block while more than `waiting` calls wait."""
        # The oldest call is in progress and does not wait. The result of a finished call is read at
        # once, to raise its error in the caller.
        while len(self._calls) > self._waiting or (self._calls and self._calls[0].done()):
            self._calls.popleft().result()
        self._calls.append(self._thread.submit(self._made, work, arguments))

    def finish(self) -> None:
        """Wait until all calls are made."""
        while self._calls:
            self._calls.popleft().result()

    def _made(self, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self._failure:
            return
        try:
            work(*arguments)
        except BaseException as failure:
            self._failure = failure
            raise

    def __enter__(self) -> BackgroundCalls:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._thread.shutdown()
        finally:
            # Again: if a signal ended the first wait, the caller would close files that the thread
            # still writes.
            self._thread.shutdown()
        if error is None:
            self.finish()
        elif self._failure and self._failure is not error:
            self._say(f"Error: {first_line(self._failure)}")
