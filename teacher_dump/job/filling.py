"""Fills the queue of the parts of a store: cuts the corpus in a thread, while this process and
others run the teacher over the parts."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from teachonce.store import Features
from teachonce.store.containers.paths import staging_of
from teachonce.store.write.part_queue import PartQueue
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.signals import Stop
from teachonce.teacher_dump.job.dump import begun, check_growth, word_counts
from teachonce.teacher_dump.job.growing import Growth
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.part_writing import check_published, other_sequences
from teachonce.teacher_dump.job.parts import count, first_of, new_parts, opened_corpus
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.window import Window, is_whole, packed

AHEAD = 16  # parts that wait for a process that takes them
POLL = 0.2  # seconds between looks at the queue when it is full


class Filling:
    """The queue being filled, by the holder of the lease of the store; `lease` is closed at the
    end.

    Making it begins the store, or checks that what is there is of the same corpus and arguments. It
    reads the whole corpus once, so that a bad line is told before hours of work, and raises
    UserError as `dump` does.
    """

    def __init__(
        self,
        options: DumpOptions,
        teacher: Teacher,
        features: Features,
        processes: int,
        lease: Lease,
        say: Callable[[str], object],
        stop: Stop,
        growth: Growth | None = None,
    ) -> None:
        self._queue, self._lease, self._say = PartQueue(options.out), lease, say
        self._ahead = max(AHEAD, 2 * processes)
        self._counters: Counter[str] = Counter()
        self._stop = threading.Event()
        try:
            self._corpus = opened_corpus(options)
            self._corpus.check()
            if growth:
                check_growth(growth, options, teacher, self._corpus, features)
            words = word_counts(options, self._corpus, growth)
            self._plan, parts = new_parts(
                *(options, self._corpus, teacher, features, self._counters, stop, growth, say)
            )
            first = first_of(parts, options, self._plan)
            vocab = growth.stage_one() if growth else None
            self._queued = self._queue.numbers()  # before the published: see `_offer`
            self._writer = begun(
                *(options, teacher, self._corpus, features, first, vocab, words, lease, growth)
            )
            if self._plan:
                self._plan.take(self._writer, stop.check)
            self._queue.begin()
        except BaseException:
            lease.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="filling")
        self._done: Future[None] = self._thread.submit(
            self._work, itertools.chain([first] if first else [], parts)
        )

    def ended(self) -> bool:
        """Whether this process fills the queue no more. Raises what has ended it before the end of
        the corpus."""
        if self._done.done():
            self._done.result()
        return self._done.done()

    def close(self) -> None:
        """Stop; another process may go on."""
        self._stop.set()
        self._thread.shutdown()

    def _work(self, parts: Iterator[list[Window]]) -> None:
        try:
            self._put_all(parts)
        except (UserError, OSError):
            try:
                self._lease.check()
            except UserError as lost:
                self._say(f"another process goes on cutting the corpus: {lost}")
                return
            raise
        finally:
            self._lease.close()

    def _put_all(self, parts: Iterator[list[Window]]) -> None:
        counts = Counter(self._plan.kept) if self._plan else Counter[str]()
        for number, windows in enumerate(parts, counts["parts"]):
            while len(self._queue.numbers() - self._queue.leased()) >= self._ahead:
                if self._stop.wait(POLL):
                    return
            if self._stop.is_set():
                return
            self._lease.check()
            self._offer(number, windows, packed(counts["sequences"], windows))
            count(counts, windows)
        self._corpus.check_unchanged()
        counts.update(self._counters, empty_lines=self._corpus.empty_lines)
        self._queue.end(counts, self._lease.token)

    def _offer(self, number: int, windows: list[Window], data: bytes) -> None:
        """Put a part into the queue, or compare it with what was put there before, in this queue or
        by now in the store.

        A part leaves the queue when it is published, or if its bytes are damaged.
        """
        before = self._queue.read(number) if number in self._queued else None
        published = self._writer.published
        if number in self._queued and before is None:
            published = staging_of(self._writer.path).published()
        if number in published:
            check_published(self._writer, number, windows)
        elif before is None or not is_whole(before):
            self._queue.put(number, data, self._lease.token)
        elif before != data:
            raise other_sequences(self._writer, number, "in the queue", "its text or tokens differ")
