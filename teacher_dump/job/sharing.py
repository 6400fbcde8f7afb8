"""One of several processes that make one store: job arrays, torchrun, or the same command typed
again on another machine.

Whoever holds the lease of the store begins it, cuts the corpus and fills the queue of parts
(`filling`). All take parts out of it, each by a lease of its own, run the teacher and publish; who
sees the last one published seals the store. A part depends on nothing but its windows and the
calibration, so the store is the one that a single process makes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.store import Features, StoreWriter
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.tools.seal import complete, lacking, seal
from teachonce.store.write.part_queue import PartQueue, Waiting
from teachonce.support.background import Behind
from teachonce.support.errors import UserError
from teachonce.support.installed import software
from teachonce.support.lease import Lease, Taken
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.chosen_features import features_of, window_length
from teachonce.teacher_dump.job.dump import (
    BATCHES_BEHIND,
    DumpSummary,
    identity_of,
    kept,
    opened,
    summary,
    teacher_of,
)
from teachonce.teacher_dump.job.finished import check_begun, check_finished
from teachonce.teacher_dump.job.growing import Growth
from teachonce.teacher_dump.job.options import DumpOptions, Shard
from teachonce.teacher_dump.job.progress import part_line
from teachonce.teacher_dump.job.telling import told
from teachonce.teacher_dump.windows.window import Unreadable, unpacked

if TYPE_CHECKING:
    from teachonce.teacher_dump.job.filling import Filling
    from teachonce.teacher_dump.teacher.teacher import Teacher

POLL = 0.2  # seconds between looks at what the other processes have done


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
        resolved, model, corpus = opened(options, say)
        with Growth.of(resolved) as growth:
            teacher = teacher_of(resolved, model)
            features = features_of(resolved, teacher, window_length(resolved.max_length, teacher))
            say(told(resolved, features))
            worker = _Worker(resolved, shard, teacher, features, corpus, say, stop, growth)
            with closing(worker), Behind(BATCHES_BEHIND, say) as behind:
                return worker.run(behind)


class _Worker:
    """This process among the others."""

    def __init__(
        self,
        options: DumpOptions,
        shard: Shard,
        teacher: Teacher,
        features: Features,
        corpus: Corpus,
        say: Callable[[str], object],
        stop: Stop,
        growth: Growth | None = None,
    ) -> None:
        self.growth = growth
        self.options, self.shard, self.teacher, self.features = options, shard, teacher, features
        self.corpus, self.say, self.stop = corpus, say, stop
        self.out, self.queue = options.out, PartQueue(options.out)
        self.filling: Filling | None = None
        self.made: Counter[str] = Counter()  # parts and tokens, and the tally of `forward`
        self.counts: dict[str, int] = {}  # of the whole store, where this process has sealed it
        self._expects: tuple[dict[str, Any], Features, dict[str, str]] | None = None
        self._words: WordCounts | None = None

    def run(self, behind: Behind) -> Shared:
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
        """Leave what is begun to the others."""
        if self.filling:
            self.filling.close()
        self.queue.close()

    def _finished(self) -> bool:
        """Whether the store is finished. Raises UserError if it is not the one that was asked
        for."""
        attributes = StoreWriter.peek(self.out, "sealed")
        if attributes is None:
            return False
        identity, features, _ = self._expected(attributes)
        check_finished(self.out, attributes, identity, features)
        return True

    def _store_is_begun(self) -> bool:
        """Whether there is the unfinished store; what it expects of this process is checked once.

        Raises UserError if it was begun with other arguments or software.
        """
        if self._expects:
            return True
        attributes = StoreWriter.peek(self.out)
        if attributes is None:
            return False
        StoreWriter.check_joinable(self.out, *self._expected(attributes))
        if self.options.mask_words != "uniform":
            self._words = WordCounts.unfinished(self.out)
        return True

    def _expected(
        self, attributes: dict[str, Any]
    ) -> tuple[dict[str, Any], Features, dict[str, str]]:
        """Return identity, features and software of the store that this process would make.

        The hashes of the corpus are taken from the store: only who fills the queue reads texts, and
        compares them.
        """

        if self._expects is None:
            self.corpus.trust(attributes["identity"].get("corpus") or {})
            vocab = self.growth.stage_one() if self.growth else None
            given = self.options, self.teacher, self.corpus, self.features
            made = identity_of(*given, vocab, self.growth)
            self._expects = made, self.features, software()
        return self._expects

    def _fill(self) -> None:
        """Fill the queue, if that is needed and nobody does."""
        from teachonce.teacher_dump.job.filling import Filling

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
        self.filling = Filling(
            *(self.options, self.teacher, self.features, self.shard.size, lease, self.say),
            *(self.stop, self.growth),
        )

    def _make(self, part: Waiting, behind: Behind) -> None:
        """Run the teacher over a part; `behind` publishes it."""
        from teachonce.teacher_dump.job.part_writing import write_part

        assert self._expects is not None
        number, begun = part.number, time.perf_counter()
        writer = StoreWriter.join(self.out, number, part.lease, *self._expects)
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
        with self.stop.held():
            write_part(
                *(writer, number, windows, first, self.teacher, self.options, self.made),
                lambda tokens: self.stop.check(),
                ours,
                self._words,
            )
            ours.call(ours.published)
        size = sum(len(w.ids) for w in windows)
        self.made["parts"] += 1
        self.made["tokens"] += size
        seconds = time.perf_counter() - begun
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
            task = self.teacher.task
            done = summary(self.out, self.counts["empty_lines"], tally, resumed, task)
        return Shared(self.made["parts"], self.made["tokens"], done)


class _Ours:
    """Hands the calls of one part on to the thread behind, as long as the part is ours.

    Where another process has taken it over, because this one was silent for too long, what is left
    to do of it is left out.
    """

    def __init__(
        self, queue: PartQueue, part: Waiting, behind: Behind, say: Callable[[str], object]
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
