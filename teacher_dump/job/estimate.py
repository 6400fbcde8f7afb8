"""Estimates what a dump is going to cost, before anything of it runs, from a sample of the corpus.

The sample is dumped as a part of a store in a temporary folder, so that what is measured is what
the dump does: the teacher on this device, the codecs, the container.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from teachonce.store import StoreWriter
from teachonce.store.format.layout import ArraySpec, Counts, part_arrays
from teachonce.store.tools.info import METADATA, stored_rows, stored_sizes
from teachonce.support.arrays import Array
from teachonce.support.background import BackgroundCalls
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.dump import BATCHES_BEHIND, word_counts
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import NumberedPart, cut_parts, first_of, tokens_of
from teachonce.teacher_dump.job.plan import DumpPlan, planned
from teachonce.teacher_dump.windows.window import Window, length_batches, storable

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

DOCUMENTS, LONGEST = 2000, 50_000  # of the sample, and the characters that are read of one
EACH = 8  # documents: of one of them the tokens are counted, for tokens per character
BATCHES = 4  # of the teacher over the sample
WEIGHTS = 1 << 26  # bytes of weights that are written to see how far they compress
KEPT_FREE = 0.95  # of the room that is there, how much a store may take


@dataclass(frozen=True)
class Estimate:
    """What a dump takes.

    exact: whether the sample was the whole corpus, so that its tokens are counted, not estimated.
    bytes_by_feature: of all parts. seconds: of the dump. pass_seconds: of one pass of the teacher
    alone over every token, as distilling online takes in each epoch of each student.
    """

    documents: int
    tokens: int
    parts: int
    exact: bool
    bytes_by_feature: dict[str, float]
    teacher_bytes: float
    seconds: float
    pass_seconds: float
    free: int | None  # None in a bucket
    copies: int  # of the parts that the disk holds while the store is sealed

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_by_feature.values()) + self.teacher_bytes

    def lines(self) -> Iterator[str]:
        """Describe it, a line each."""
        about = "" if self.exact else "about "
        words = f"{counted(self.tokens, 'token')} of {counted(self.documents, 'document')}"
        yield f"corpus    {about}{words}"
        yield f"parts     at most {self.parts:,}"
        for name, size in sorted(self.bytes_by_feature.items(), key=lambda item: -item[1]):
            yield f"bytes     {name:24} {readable(size):>8}, {size / self.tokens:,.2f} a token"
        yield f"bytes     {'teacher':24} {readable(self.teacher_bytes):>8}"
        yield f"bytes     {'all':24} {readable(self.total_bytes):>8}"
        yield (
            f"time      {_duration(self.seconds)} on this device by one process"
            f" ({self.tokens / self.seconds:,.0f} tokens/s, from a sample)"
        )
        epochs = self.seconds / self.pass_seconds
        yield (
            f"pays      from {epochs:.1f} epochs on, of one student or of several: this is what the"
            " dump costs in passes of the teacher, which without a store runs in every epoch of"
            " every student"
        )
        twice = ", twice the parts while it is sealed" if self.copies > 1 else ""
        free = "nobody tells how much is" if self.free is None else readable(self.free)
        yield f"room      {free} free, {readable(self.needed)} needed{twice}"

    @property
    def needed(self) -> float:
        """Bytes of the disk that the dump takes at most."""
        return self.total_bytes + (self.copies - 1) * sum(self.bytes_by_feature.values())

    def check_room(self, out: Path | str) -> None:
        """Raise UserError where the disk is too small."""
        if self.free is not None and self.needed > KEPT_FREE * self.free:
            raise UserError(
                f"{out}: the disk has {readable(self.free)} free, and the store needs"
                f" {readable(self.needed)}; make room, give another disk as --out, or keep less"
                " (--codec small, fewer features or --views, --limit)"
            )


def estimate(options: DumpOptions, say: Callable[[str], object] = lambda line: None) -> Estimate:
    """Estimate what the dump would take, from a sample; nothing is written that stays.

    The corpus is read once. Raises UserError as `dump` does for bad input.
    """
    with stoppable(lambda: f"{options.out}: nothing is written yet") as stop:
        StoreWriter.check_writable(options.out, shared=True)
        with planned(options, say, read_corpus=False) as plan:
            return _estimate(plan, say, stop)


def _estimate(plan: DumpPlan, say: Callable[[str], object], stop: Stop) -> Estimate:
    options, sample_size = plan.options, BATCHES * plan.options.batch_tokens
    say(plan.features_line())
    if plan.features.task:
        plan.corpus.check()  # a wrong label is reported here, too
    sample = _Sample(plan.corpus, plan.teacher.tokenizer, options.limit)
    one_part = replace(options, part_tokens=sample_size, limit=None)
    sampled = replace(plan, corpus=sample, options=one_part)
    parts = cut_parts(sampled, Counter(), stop, sample, None)
    windows = first_of(parts, plan)
    found = tokens_of(windows) + sum(map(tokens_of, parts))
    tokens = round(found * sample.characters / sample.kept_characters)
    if options.limit is not None:
        tokens = min(tokens, options.limit)
    with tempfile.TemporaryDirectory(prefix="teacher-dump-plan-") as folder:
        out = Path(folder) / f"sample{PurePath(options.out).suffix}"
        sampled = replace(sampled, options=replace(one_part, out=out))
        alone, taken = _pass_seconds(sampled, windows), _dump_seconds(sampled, windows, stop)
        number = ceil(tokens / options.part_tokens)
        by_feature = _bytes_by_feature(sampled, out, windows, tokens, options.part_tokens)
        teacher_bytes = _teacher_bytes(plan, stored_sizes(out))
    size = tokens_of(windows)
    return Estimate(
        documents=sample.documents,
        tokens=tokens,
        parts=number,
        exact=sample.exact,
        bytes_by_feature=by_feature,
        teacher_bytes=teacher_bytes,
        seconds=taken / size * tokens,
        pass_seconds=alone / size * tokens,
        free=_free(options.out),
        copies=2 if PurePath(options.out).suffix == ".h5" else 1,
    )


def _bytes_by_feature(
    sampled: DumpPlan, out: Path, windows: list[Window], tokens: int, part_tokens: int
) -> dict[str, float]:
    """Estimate the bytes of all parts from the bytes of the part that the sample was written as."""
    size, parts = tokens_of(windows), ceil(tokens / part_tokens)
    sizes = stored_sizes(out, 0)
    found = {"metadata": float(sizes.pop(METADATA) * parts)}
    none = (0,) * sampled.features.views
    counts = Counts(len(windows), size, 0, 0, none, none)  # what the arrays are like, no more
    specs = part_arrays(sampled.features, counts)
    for name, stored in sizes.items():

        def rows(tokens: int, spec: ArraySpec = specs[name]) -> int:
            return stored_rows(out, spec, tokens)

        last = tokens - (parts - 1) * part_tokens
        all_rows = (parts - 1) * rows(part_tokens) + rows(last)
        feature = _feature(name)
        found[feature] = found.get(feature, 0.0) + stored / rows(size) * all_rows
    return found


class _Sample(Corpus):
    """Some documents of a corpus, each as likely as any other, in random order (reservoir
    sampling, Vitter 1985, algorithm R)."""

    def __init__(self, corpus: Corpus, tokenizer: Any, limit: int | None) -> None:
        super().__init__(corpus.sources, corpus.columns)
        chance = random.Random(0)
        self.characters = 0
        self._kept: list[Document] = []
        for document in corpus if limit is None else _first(corpus, tokenizer, limit):
            self.characters += len(document.text)
            self.documents = document.number + 1
            place = document.number
            if place >= DOCUMENTS:
                place = chance.randrange(place + 1)
            if place < DOCUMENTS:
                short = replace(document, text=document.text[:LONGEST])
                self._kept[place : place + 1] = [short]
        self.kept_characters = sum(len(document.text) for document in self._kept)
        self.exact = self.kept_characters == self.characters
        chance.shuffle(self._kept)

    def __iter__(self) -> Iterator[Document]:
        return (replace(document, number=i) for i, document in enumerate(self._kept))


def _first(corpus: Corpus, tokenizer: Any, limit: int) -> Iterator[Document]:
    """Yield the documents up to where `limit` tokens end, by one of EACH that is tokenised."""
    characters = seen = tokens = 0
    for document in corpus:
        yield document
        characters += len(document.text)
        if document.number % EACH == 0:
            seen += len(document.text)
            text = storable(document.text[:LONGEST], Counter())
            tokens += (
                len(tokenizer.backend_tokenizer.encode(text)) * len(document.text) // len(text)
            )
        if characters * tokens > limit * seen:
            return


def _free(out: Path | str) -> int | None:
    """Return the bytes that are free where a store will lie; None in a bucket."""
    return shutil.disk_usage(out.resolve().parent).free if isinstance(out, Path) else None


def _pass_seconds(sampled: DumpPlan, windows: list[Window]) -> float:
    """Seconds of the teacher over the sample, nothing kept; once before to warm up."""
    from teachonce.teacher_dump.teacher.forward import forward

    inputs = [w.ids for w in windows]
    batches = length_batches([len(ids) for ids in inputs], sampled.options.batch_tokens)
    for chosen in (batches[:1], batches):
        start = time.perf_counter()
        for _ in forward(sampled.teacher, windows, inputs, chosen, 0, Counter()):
            pass
        taken = time.perf_counter() - start
    return taken


def _dump_seconds(sampled: DumpPlan, windows: list[Window], stop: Stop) -> float:
    """Dump the sample, and return the seconds of its part."""
    from teachonce.teacher_dump.job.part_writing import calibration, write_part

    words, teacher, logits = word_counts(sampled), sampled.teacher, sampled.features.logits
    writer = StoreWriter.create_or_resume(
        sampled.options.out,
        identity={},  # of a store that nobody reads: the teacher's weights need no hash
        features=sampled.features,
        calibration=calibration(sampled, windows),
        files=teacher.files(),
        weights=_some(teacher) if sampled.options.weights else {},
        head=teacher.head_arrays() if logits and logits.tier == "head" else None,
        extras=(words,),
    )
    part, check = NumberedPart(0, 0, windows), lambda tokens: stop.check()
    with closing(writer):
        start = time.perf_counter()
        with BackgroundCalls(BATCHES_BEHIND) as behind:
            write_part(sampled, writer, part, words, Counter(), check, behind)
        return time.perf_counter() - start


def _some(teacher: Teacher) -> Iterator[tuple[str, Array]]:
    size = 0
    for name, array in teacher.weights():
        if size and size + array.nbytes > WEIGHTS:
            return
        size += array.nbytes
        yield name, array


def _teacher_bytes(plan: DumpPlan, outside: dict[str, int]) -> float:
    """Bytes outside the parts: those of the sample, and of the weights that it left out."""
    found = float(sum(outside.values()))
    if plan.options.weights:
        written = {name: array.nbytes for name, array in _some(plan.teacher)}
        whole = sum(array.nbytes for _, array in plan.teacher.weights())
        stored = sum(outside[f"teacher/weights/{name}"] for name in written)
        found += stored * (whole / sum(written.values()) - 1)
    return found


def _feature(name: str) -> str:
    """Name the feature that an array of a part is of, in whatever view: `hidden/mean`, `logits`."""
    first, *more = name.split("/")
    if first.startswith("view"):
        return "/".join(more[: 2 if more[0] in ("hidden", "attention") else 1])
    return "text and tokens" if first in ("text", "token") else "/".join([first, *more[:-1]])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
