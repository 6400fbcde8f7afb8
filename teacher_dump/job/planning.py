"""What a dump is going to cost, before anything of it runs: told from a sample of the corpus.

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

from teachonce.store import Features, OutsideParts, StoreWriter
from teachonce.store.format.layout import ArraySpec, Counts, part_arrays
from teachonce.store.tools.info import METADATA, stored_rows, stored_sizes
from teachonce.support.arrays import Array
from teachonce.support.background import Behind
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.chosen_features import features_of, window_length
from teachonce.teacher_dump.job.dump import BATCHES_BEHIND, opened, teacher_of, word_counts
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import cut_parts, first_of
from teachonce.teacher_dump.job.telling import told
from teachonce.teacher_dump.windows.window import Window, length_batches, storable

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

DOCUMENTS, LONGEST = 2000, 50_000  # of the sample, and the characters that are read of one
EACH = 8  # of the documents of which one tells how many tokens there are in a character
BATCHES = 4  # of the teacher over the sample
WEIGHTS = 1 << 26  # bytes of weights that are written to see how far they compress
KEPT_FREE = 0.95  # of the room that is there, how much a store may take


@dataclass(frozen=True)
class Plan:
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
        """Tell it, a line each."""
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


def plan(options: DumpOptions, say: Callable[[str], object] = lambda line: None) -> Plan:
    """Work out what the dump would take, from a sample; nothing is written that stays.

    The corpus is read once. Raises UserError as `dump` does for bad input.
    """
    with stoppable(lambda: f"{options.out}: nothing is written yet") as stop:
        StoreWriter.check(options.out, shared=True)
        options, model, corpus = opened(options, say)
        teacher = teacher_of(options, model)
        features = features_of(options, teacher, window_length(options.max_length, teacher))
        say(told(options, features))
        if features.task:
            corpus.check()  # a wrong label is told here, too
        sample = _Sample(corpus, teacher.tokenizer, options.limit)
        one_part = replace(options, part_tokens=BATCHES * options.batch_tokens, limit=None)
        counters: Counter[str] = Counter()
        parts = cut_parts(one_part, sample, teacher, features, counters, stop)
        first = first_of(parts, options)
        tokens = _tokens(first) + sum(map(_tokens, parts))
        whole = round(tokens * sample.characters / sample.kept_characters)
        if options.limit is not None:
            whole = min(whole, options.limit)
        return _measured(one_part, options, teacher, features, first, sample, whole, stop)


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


def _measured(
    one_part: DumpOptions,
    options: DumpOptions,
    teacher: Teacher,
    features: Features,
    windows: list[Window],
    sample: _Sample,
    tokens: int,
    stop: Stop,
) -> Plan:
    size = _tokens(windows)
    parts = ceil(tokens / options.part_tokens)
    with tempfile.TemporaryDirectory(prefix="teacher-dump-plan-") as folder:
        out = Path(folder) / f"sample{PurePath(options.out).suffix}"
        one_part = replace(one_part, out=out)
        alone = _pass_seconds(one_part, teacher, windows)
        taken = _dump_seconds(one_part, teacher, features, windows, sample, stop)
        sizes, outside = stored_sizes(out, 0), stored_sizes(out)
    by_feature = {"metadata": float(sizes.pop(METADATA) * parts)}
    specs = part_arrays(features, _counts(features, windows))
    for name, stored in sizes.items():

        def rows(tokens: int, spec: ArraySpec = specs[name]) -> int:
            return stored_rows(out, spec, tokens)

        last = tokens - (parts - 1) * options.part_tokens
        all_rows = (parts - 1) * rows(options.part_tokens) + rows(last)
        feature = _feature(name)
        by_feature[feature] = by_feature.get(feature, 0.0) + stored / rows(size) * all_rows
    return Plan(
        documents=sample.documents,
        tokens=tokens,
        parts=parts,
        exact=sample.exact,
        bytes_by_feature=by_feature,
        teacher_bytes=_teacher_bytes(options, teacher, outside),
        seconds=taken / size * tokens,
        pass_seconds=alone / size * tokens,
        free=_free(options.out),
        copies=2 if PurePath(options.out).suffix == ".h5" else 1,
    )


def _free(out: Path | str) -> int | None:
    """Return the bytes that are free where a store will lie; None in a bucket."""
    return shutil.disk_usage(out.resolve().parent).free if isinstance(out, Path) else None


def _counts(features: Features, windows: list[Window]) -> Counts:
    """Return counts by which `part_arrays` tells what the arrays of the sample are like."""
    none = (0,) * features.views
    return Counts(len(windows), _tokens(windows), 0, 0, none, none)


def _pass_seconds(options: DumpOptions, teacher: Teacher, windows: list[Window]) -> float:
    """Seconds of the teacher over the sample, nothing kept; once before to warm up."""
    from teachonce.teacher_dump.teacher.forward import forward

    inputs = [w.ids for w in windows]
    batches = length_batches([len(ids) for ids in inputs], options.batch_tokens)
    for chosen in (batches[:1], batches):
        begun = time.perf_counter()
        for _ in forward(teacher, windows, inputs, chosen, 0, Counter()):
            pass
        taken = time.perf_counter() - begun
    return taken


def _dump_seconds(
    options: DumpOptions,
    teacher: Teacher,
    features: Features,
    windows: list[Window],
    sample: _Sample,
    stop: Stop,
) -> float:
    """Dump the sample, and return the seconds of its part."""
    from teachonce.teacher_dump.job.calibration import calibration
    from teachonce.teacher_dump.job.part_writing import write_part

    words = word_counts(options, sample)
    head = bool(features.logits and features.logits.tier == "head")
    writer = StoreWriter.create_or_resume(
        options.out,
        identity={},
        features=features,
        outside=OutsideParts(
            calibration=calibration(options, teacher, windows),
            files=teacher.files(),
            weights=_some(teacher) if options.weights else {},
            head=teacher.head_arrays() if head else None,
            extras=(words,),
        ),
    )
    with closing(writer):
        begun = time.perf_counter()
        with Behind(BATCHES_BEHIND) as behind:
            write_part(
                *(writer, 0, windows, 0, teacher, options, Counter()),
                lambda count: stop.check(),
                behind,
                words,
            )
        return time.perf_counter() - begun


def _some(teacher: Teacher) -> Iterator[tuple[str, Array]]:
    size = 0
    for name, array in teacher.weights():
        if size and size + array.nbytes > WEIGHTS:
            return
        size += array.nbytes
        yield name, array


def _teacher_bytes(options: DumpOptions, teacher: Teacher, outside: dict[str, int]) -> float:
    """Bytes outside the parts: those of the sample, and of the weights that it left out."""
    found = float(sum(outside.values()))
    if options.weights:
        kept = {name: a.nbytes for name, a in _some(teacher)}
        whole = sum(array.nbytes for _, array in teacher.weights())
        stored = sum(outside[f"teacher/weights/{name}"] for name in kept)
        found += stored * (whole / sum(kept.values()) - 1)
    return found


def _tokens(windows: list[Window]) -> int:
    return sum(len(w.ids) for w in windows)


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
