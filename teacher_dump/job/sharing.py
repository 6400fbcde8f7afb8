"""Shares a dump between processes: job arrays, torchrun, or the same command on other machines.

The process that holds the lease of the store creates it and cuts the corpus into a queue of parts,
in a thread. Every process takes parts from the queue, each with its own lease, runs the teacher and
publishes them. The process that sees the last part published seals the store. A part depends only
on its windows and the calibration, so the store equals the store of a single process.
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
from teachonce.store.tools.seal import is_complete, missing_parts, seal
from teachonce.store.write.part_queue import PartQueue, QueuedPart
from teachonce.support.background import BackgroundCalls
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease, Taken
from teachonce.support.packages import software
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.job.dump import (
    BATCHES_BEHIND,
    DumpSummary,
    check_existing,
    count_finished,
    open_writer,
    summary,
    word_counts,
    written_line,
)
from teachonce.teacher_dump.job.inputs import open_corpus
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import (
    NumberedPart,
    check_published,
    count,
    first_part,
    other_sequences,
    parts_of,
)
from teachonce.teacher_dump.job.plan import DumpPlan, planned
from teachonce.teacher_dump.job.progress import part_line
from teachonce.teacher_dump.windows.window import (
    Unreadable,
    Window,
    count_tokens,
    is_whole,
    packed,
    unpacked,
)

AHEAD = 16  # parts that may wait in the queue
POLL = 0.2  # seconds between looks at the work of other processes, or at a full queue


@dataclass(frozen=True)
class ProcessSummary:
    """Holds the report of one of several processes: the parts and tokens that it wrote. `store`
    describes the whole store in the process that sealed it, and is None in the others."""

    parts: int
    tokens: int
    store: DumpSummary | None


def share(
    options: DumpOptions, shard: ProcessShard, say: Callable[[str], object] = lambda line: None
) -> ProcessSummary:
    """Write parts of a store together with other processes, until it is finished.

    Parts k with k % `shard.size` == `shard.place` are taken first, then parts that other processes
    left. Processes may start and end at any time. Raises UserError for bad input, and if the store
    was started with other arguments or software; Stopped like `dump`.
    """
    with stoppable(lambda: written_line(options.out)) as stop:
        # A finished store is not handled here: `run` compares its whole identity, then reports it.
        check_existing(options, shared=True)
        with planned(options, say, read_corpus=False) as plan:
            say(plan.features_line())
            worker = _Worker(plan, shard, say, stop)
            # In this order: leases are released only after the thread has made its last calls.
            with closing(worker), BackgroundCalls(BATCHES_BEHIND, say) as behind:
                return worker.run(behind)


class _Worker:
    """Fills the queue if no other process does, writes parts, and seals the store."""

    def __init__(
        self, plan: DumpPlan, shard: ProcessShard, say: Callable[[str], object], stop: Stop
    ) -> None:
        self.plan, self.shard, self.say, self.stop = plan, shard, say, stop
        self.out, self.queue = plan.options.out, PartQueue(plan.options.out)
        self.filler: _QueueFiller | None = None
        self.made: Counter[str] = Counter()  # parts and tokens, and the tally of `forward`
        self.counts: dict[str, int] = {}  # of the whole store, if this process sealed it
        self._software = software()
        self._joined = False  # whether the store exists, and its identity equals this process's
        self._words: WordCounts | None = None

    def run(self, behind: BackgroundCalls) -> ProcessSummary:
        """Write parts until the store is finished."""
        waited = False
        while not self._finished():
            self.stop.check()
            self._fill()
            if self._store_exists() and (part := self.queue.take(*self.shard)):
                self._make(part, behind)
                continue
            # The store is complete only once the last parts of this process are published, too.
            behind.finish()
            if not self._seal():
                if not (waited or self.filler):
                    self.say("waiting for the other processes that write this store")
                    waited = True
                time.sleep(POLL)
        return self._report()

    def close(self) -> None:
        """Leave unfinished work to the other processes."""
        if self.filler:
            self.filler.close()
        self.queue.close()

    def _finished(self) -> bool:
        """Return whether the store is finished. Raises UserError if it was made with other
        arguments."""
        attributes = StoreWriter.peek(self.out, "sealed")
        if attributes is None:
            return False
        identity = self._identity(attributes)
        count_finished(self.out, attributes, identity, self.plan.features)
        return True

    def _store_exists(self) -> bool:
        """Return whether the unfinished store exists. Its identity is compared once.

        Raises UserError if it was started with other arguments or software.
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
            # Read from the store: every process must mask the same words, and counting them again
            # would read the corpus.
            self._words = WordCounts.unfinished(self.out)
        return True

    def _identity(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the identity of the store that this process would write, for comparison."""
        # Hashing a large corpus in every process would take hours. Only the process that fills the
        # queue reads texts and compares their hashes; the others trust the store's.
        self.plan.corpus.trust(attributes["identity"].get("corpus"))
        return self.plan.identity

    def _fill(self) -> None:
        """Start filling the queue if parts are missing and no other process fills it."""
        if self.filler:
            if self.filler.ended():
                self.filler = None
            return
        # None: the queue is not complete, and the lease shows whether a process is filling it.
        if missing_parts(self.out) == set():
            return
        try:
            lease = Lease(Path(self.out))
        except Taken:
            return
        if StoreWriter.peek(self.out, "sealed") or missing_parts(self.out) == set():
            lease.close()  # another process was faster
            return
        ahead = max(AHEAD, 2 * self.shard.size)
        self.filler = _QueueFiller(self.plan, ahead, lease, self.say, self.stop)

    def _make(self, part: QueuedPart, behind: BackgroundCalls) -> None:
        """Run the teacher over a part; `behind` publishes it."""
        from teachonce.teacher_dump.job.part_writing import dump_part

        plan, number, start = self.plan, part.number, time.perf_counter()
        expected = plan.identity, plan.features, self._software
        writer = StoreWriter.join(self.out, number, part.lease, *expected)
        try:
            first, windows = unpacked(part.data)
        except Unreadable as error:
            self.say(
                f"part {number}: its file in the queue is damaged ({error}); its texts are"
                " tokenized again"
            )
            windows = []
        # A process that died between `publish` and `drop` leaves a published part in the queue. A
        # damaged part that is not published is missing once it is dropped: `_fill` cuts it again.
        if not windows or number in writer.published:
            self.queue.drop(number)
            self.queue.release(number)
            return
        calls = _LeasedCalls(self.queue, part, behind, self.say)
        with self.stop.deferred():
            dump_part(
                plan,
                writer,
                NumberedPart(number, first, windows),
                self._words,
                self.made,
                lambda tokens: self.stop.check(),
                calls,
            )
            calls.call(calls.published)
        size = count_tokens(windows)
        self.made["parts"] += 1
        self.made["tokens"] += size
        seconds = time.perf_counter() - start
        self.say(part_line(number, len(windows), size, seconds, self.made["tokens"]))

    def _seal(self) -> bool:
        """Seal the store if every part is published. Returns whether the store is finished."""
        if not is_complete(self.out):
            return False
        counts = self.queue.ended()
        if self.plan.growth:
            self.plan.growth.store.watch.check()
        try:
            if seal(self.out) and counts:
                self.counts = counts
        except Taken:
            return False
        return True

    def _report(self) -> ProcessSummary:
        done = None
        if self.counts:
            resumed = self.counts["parts"] - self.made["parts"]
            tally = Counter(self.counts)
            # Counted in this process alone: the queue does not carry these counts of the others.
            tally.update({name: self.made[name] for name in ("halved", "widened")})
            done = summary(self.plan, self.counts["empty_lines"], tally, resumed)
        return ProcessSummary(self.made["parts"], self.made["tokens"], done)


class _LeasedCalls:
    """Passes the calls of one part to the writing thread while this process holds the part's lease.

    If the lease expired and another process took the part, the remaining calls are dropped.
    """

    def __init__(
        self,
        queue: PartQueue,
        part: QueuedPart,
        behind: BackgroundCalls,
        say: Callable[[str], object],
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
        # Calls fail once the new holder of the lease clears the part's files (`StoreWriter.join`).
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


class _QueueFiller:
    """Fills the queue of parts in a thread. It needs the lease of the store, and releases it at the
    end.

    The constructor reads the whole corpus once, so that a bad line is reported before hours of
    work. Then it creates the store, or compares an existing one with corpus and arguments. Raises
    UserError like `dump`.
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
            # The worker's own corpus has trusted the hashes of the store; this one is compared.
            plan = replace(plan, corpus=open_corpus(plan.options))
            self._corpus = plan.corpus
            self._corpus.check()
            plan.check_growth()
            words = word_counts(plan)
            self._copy_plan, parts = parts_of(plan, self._counters, stop, say)
            first = first_part(parts, plan, say, self._copy_plan)
            # Read before the published parts: a part that leaves the queue in between is then found
            # among the published ones (`_offer`).
            self._queued = self._queue.numbers()
            self._writer = open_writer(plan, first, words, say, lease)
            if self._copy_plan:
                self._copy_plan.copy(self._writer, stop.check)
            self._queue.begin()
        except BaseException:
            lease.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="filling")
        self._done: Future[None] = self._thread.submit(
            self._work, itertools.chain([first] if first else [], parts)
        )

    def ended(self) -> bool:
        """Return whether filling has ended. Raises the error that ended it, if any."""
        if self._done.done():
            self._done.result()
        return self._done.done()

    def close(self) -> None:
        """Stop filling; another process may continue."""
        self._stop.set()
        self._thread.shutdown()

    def _work(self, parts: Iterator[list[Window]]) -> None:
        try:
            self._put_all(parts)
        # Without the lease another process may have changed the files, so that the error means
        # nothing.
        except (UserError, OSError):
            try:
                self._lease.check()
            except UserError as lost:
                self._say(f"another process continues to cut the corpus: {lost}")
                return
            raise
        finally:
            self._lease.close()

    def _put_all(self, parts: Iterator[list[Window]]) -> None:
        counts = Counter(self._copy_plan.counts) if self._copy_plan else Counter[str]()
        for number, windows in enumerate(parts, counts["parts"]):
            while len(self._queue.numbers() - self._queue.leased()) >= self._ahead:
                if self._stop.wait(POLL):
                    return
            if self._stop.is_set():
                return
            self._lease.check()
            self._offer(number, windows, packed(counts["sequences"], windows))
            count(counts, windows)
        # Before `end`: once the number of parts is known, any process may seal the store.
        self._corpus.check_unchanged()
        counts.update(self._counters, empty_lines=self._corpus.empty_lines)
        self._queue.end(counts, self._lease.token)

    def _offer(self, number: int, windows: list[Window], data: bytes) -> None:
        """Put a part into the queue, unless an earlier run queued or published it. Raises UserError
        if that part has other sequences."""
        # A part leaves the queue when it is published, or if its bytes are damaged.
        stored = self._queue.read(number) if number in self._queued else None
        published = self._writer.published
        if number in self._queued and stored is None:
            published = staging_of(self._writer.path).published()
        if number in published:
            check_published(self._writer, number, windows)
        elif stored is None or not is_whole(stored):
            self._queue.put(number, data, self._lease.token)
        elif stored != data:
            raise other_sequences(self._writer, number, "in the queue", "its text or tokens differ")
