"""One of several processes that make one store: job arrays, torchrun, or the same command typed
again on another machine.

The process that holds the lease of the store begins it, and cuts the corpus in a thread, which
fills the queue of parts. All take parts out of it, each by a lease of its own, run the teacher and
publish; the process that sees the last part published seals the store. A part depends on nothing
but its windows and the calibration, so the store is the one that a single process makes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teachonce.store import StoreWriter
from teachonce.store.containers.paths import staging_of
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.tools.seal import complete, lacking, seal
from teachonce.store.write.part_queue import PartQueue, Waiting
from teachonce.support.background import BackgroundCalls
from teachonce.support.errors import UserError
from teachonce.support.installed import software
from teachonce.support.lease import Lease, Taken
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.job.dump import (
    BATCHES_BEHIND,
    DumpSummary,
    begin_store,
    check_begun,
    check_finished,
    kept,
    summary,
    word_counts,
)
from teachonce.teacher_dump.job.options import DumpOptions, Shard
from teachonce.teacher_dump.job.parts import (
    NumberedPart,
    check_published,
    count,
    first_of,
    other_sequences,
    parts_of,
    tokens_of,
)
from teachonce.teacher_dump.job.plan import DumpPlan, open_corpus, planned
from teachonce.teacher_dump.job.progress import part_line
from teachonce.teacher_dump.windows.window import Unreadable, Window, is_whole, packed, unpacked

AHEAD = 16  # parts that wait for a process that takes them
POLL = 0.2  # seconds between looks at what the other processes have done, or at a full queue


@dataclass(frozen=True)
class Shared:
    """What one of several processes reports: its own parts and tokens, and of the finished store
    where it was the one that sealed it."""

    parts: int
    tokens: int
    store: DumpSummary | None


def share(
    options: DumpOptions, shard: Shard, say: Callable[[str], object] = lambda line: None
) -> Shared:
    """Make parts of a store together with other processes, until it is finished.

    The parts k with k % `shard.size` == `shard.place` are made first, then what the others have
    left. Any number of processes may come and go. Raises UserError for bad input, and where the
    store was begun with other arguments or other software; Stopped as `dump` does.
    """
    with stoppable(lambda: kept(options.out)) as stop:
        check_begun(options, shared=True)
        with planned(options, say, read_corpus=False) as plan:
            say(plan.features_line())
            worker = _Worker(plan, shard, say, stop)
            with closing(worker), BackgroundCalls(BATCHES_BEHIND, say) as behind:
                return worker.run(behind)


class _Worker:
    """This process among the others."""

    def __init__(
        self, plan: DumpPlan, shard: Shard, say: Callable[[str], object], stop: Stop
    ) -> None:
        self.plan, self.shard, self.say, self.stop = plan, shard, say, stop
        self.out, self.queue = plan.options.out, PartQueue(plan.options.out)
        self.filling: _Filling | None = None
        self.made: Counter[str] = Counter()  # parts and tokens, and the tally of `forward`
        self.counts: dict[str, int] = {}  # of the whole store, where this process has sealed it
        self._software = software()
        self._joined = False  # whether the store was found, and is what this process would write
        self._words: WordCounts | None = None

    def run(self, behind: BackgroundCalls) -> Shared:
        """Make parts until the store is finished."""
        waited = False
        while not self._finished():
            self.stop.check()
            self._fill()
            if self._store_is_begun() and (part := self.queue.take(*self.shard)):
                self._make(part, behind)
                continue
            behind.finish()
            if not self._seal():
                if not (waited or self.filling):
                    self.say("waits for the other processes that write this store")
                    waited = True
                time.sleep(POLL)
        return self._report()

    def close(self) -> None:
        """Leave unfinished work to the other processes."""
        if self.filling:
            self.filling.close()
        self.queue.close()

    def _finished(self) -> bool:
        """Whether the store is finished. Raises UserError if it is not the one that was asked
        for."""
        attributes = StoreWriter.peek(self.out, "sealed")
        if attributes is None:
            return False
        identity = self._identity(attributes)
        check_finished(self.out, attributes, identity, self.plan.features)
        return True

    def _store_is_begun(self) -> bool:
        """Whether there is the unfinished store; what it expects of this process is checked once.

        Raises UserError if it was begun with other arguments or software.
        """
        if self._joined:
            return True
        attributes = StoreWriter.peek(self.out)
        if attributes is None:
            return False
        identity = self._identity(attributes)
        StoreWriter.check_joinable(self.out, identity, self.plan.features, self._software)
        self._joined = True
        if self.plan.options.mask_words != "uniform":
            self._words = WordCounts.unfinished(self.out)
        return True

    def _identity(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the identity of the store that this process would make.

        The hashes of the corpus are taken from the store: only the process that fills the queue
        reads texts, and compares them.
        """
        self.plan.corpus.trust(attributes["identity"].get("corpus") or {})
        return self.plan.identity

    def _fill(self) -> None:
        """Fill the queue, if that is needed and nobody does."""
        if self.filling:
            if self.filling.ended():
                self.filling = None
            return
        if lacking(self.out) == set():
            return
        try:
            lease = Lease(Path(self.out))
        except Taken:
            return
        if StoreWriter.peek(self.out, "sealed") or lacking(self.out) == set():
            lease.close()  # another process has been faster
            return
        ahead = max(AHEAD, 2 * self.shard.size)
        self.filling = _Filling(self.plan, ahead, lease, self.say, self.stop)

    def _make(self, part: Waiting, behind: BackgroundCalls) -> None:
        """Run the teacher over a part; `behind` publishes it."""
        from teachonce.teacher_dump.job.part_writing import write_part

        plan, number, start = self.plan, part.number, time.perf_counter()
        expected = plan.identity, plan.features, self._software
        writer = StoreWriter.join(self.out, number, part.lease, *expected)
        try:
            first, windows = unpacked(part.data)
        except Unreadable as error:
            self.say(f"part {number}: cannot be read in the queue ({error}); it is cut again")
            windows = []
        if not windows or number in writer.published:
            self.queue.drop(number)
            self.queue.release(number)
            return
        ours = _Ours(self.queue, part, behind, self.say)
        with self.stop.deferred():
            write_part(
                plan,
                writer,
                NumberedPart(number, first, windows),
                self._words,
                self.made,
                lambda tokens: self.stop.check(),
                ours,
            )
            ours.call(ours.published)
        size = tokens_of(windows)
        self.made["parts"] += 1
        self.made["tokens"] += size
        seconds = time.perf_counter() - start
        self.say(part_line(number, len(windows), size, seconds, self.made["tokens"]))

    def _seal(self) -> bool:
        """Seal the store if every part is there; whether it is finished now."""
        if not complete(self.out):
            return False
        counts = self.queue.ended()
        try:
            if seal(self.out) and counts:
                self.counts = counts
        except Taken:
            return False
        return True

    def _report(self) -> Shared:
        done = None
        if self.counts:
            resumed = self.counts["parts"] - self.made["parts"]
            tally = Counter(self.counts)
            tally.update({name: self.made[name] for name in ("halved", "widened")})
            done = summary(self.plan, self.counts["empty_lines"], tally, resumed)
        return Shared(self.made["parts"], self.made["tokens"], done)


class _Ours:
    """Hands the calls of one part on to the thread behind, as long as the part is ours.

    Where another process has taken it over, because this one was silent for too long, what is left
    to do of it is left out.
    """

    def __init__(
        self, queue: PartQueue, part: Waiting, behind: BackgroundCalls, say: Callable[[str], object]
    ) -> None:
        self._queue, self._part, self._behind, self._say = queue, part, behind, say
        self._lost = False

    def call(self, work: Callable[..., object], *arguments: Any) -> None:
        self._behind.call(self._attempt, work, arguments)

    def _attempt(self, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self._lost:
            return
        try:
            work(*arguments)
        except UserError:
            try:
                self._part.lease.check()
            except UserError as lost:
                self._lost = True
                self._say(f"part {self._part.number} is left to another process: {lost}")
                self._queue.release(self._part.number)
            else:
                raise

    def published(self) -> None:
        """Take the part out of the queue."""
        self._queue.drop(self._part.number)
        self._queue.release(self._part.number)


class _Filling:
    """The queue being filled, by the holder of the lease of the store; `lease` is closed at the
    end.

    Making it begins the store, or checks that what is there is of the same corpus and arguments. It
    reads the whole corpus once, so that a bad line is reported before hours of work, and raises
    UserError as `dump` does.
    """

    def __init__(
        self,
        plan: DumpPlan,
        ahead: int,
        lease: Lease,
        say: Callable[[str], object],
        stop: Stop,
    ) -> None:
        self._queue, self._lease, self._say = PartQueue(plan.options.out), lease, say
        self._ahead = ahead
        self._counters: Counter[str] = Counter()
        self._stop = threading.Event()
        try:
            # the worker's own corpus has trusted the hashes of the store
            plan = replace(plan, corpus=open_corpus(plan.options))
            self._corpus = plan.corpus
            self._corpus.check()
            plan.check_growth()
            words = word_counts(plan)
            self._taken, parts = parts_of(plan, self._counters, stop, say)
            first = first_of(parts, plan, self._taken)
            self._queued = self._queue.numbers()  # before the published: see `_offer`
            self._writer = begin_store(plan, first, words, lease)
            if self._taken:
                self._taken.take(self._writer, stop.check)
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
        counts = Counter(self._taken.kept) if self._taken else Counter[str]()
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
