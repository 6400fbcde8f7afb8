"""Estimates size and time of a dump from a sample of the corpus, before the dump starts.

The sample is dumped as one part of a store in a temporary folder. So the estimate uses the real
teacher, device, codecs and container.
"""

from __future__ import annotations

import itertools
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

from tqdm.auto import tqdm

from teachonce.store import StoreWriter
from teachonce.store.format.layout import Counts, part_arrays
from teachonce.store.format.sequences import SEPARATOR
from teachonce.store.tools.info import METADATA, stored_rows, stored_sizes
from teachonce.support.arrays import Array
from teachonce.support.background import BackgroundCalls
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.dump import BATCHES_BEHIND, word_counts
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import NumberedPart, cut_parts, first_part
from teachonce.teacher_dump.job.plan import DumpPlan, planned
from teachonce.teacher_dump.windows.cutting import encoder
from teachonce.teacher_dump.windows.label_numbers import ignore_line
from teachonce.teacher_dump.windows.window import Window, count_tokens, length_batches, storable

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

DOCUMENTS, LONGEST = 2000, 50_000  # documents in the sample, and characters used of each
EACH = 8  # every EACH-th document is tokenized to measure tokens per character
BATCHES = 4  # batches of the teacher over the sample, at most
PROBE, SECONDS = 4, 3.0  # windows that are timed; limit of a pass over the sample, in seconds
WEIGHTS = 1 << 26  # bytes of weights that are written to measure how well they compress
NIGHT = 8 * 3600.0  # seconds; for a longer dump the report names what takes this long
USABLE_SHARE = 0.95  # share of the free space on the disk that a store may take


@dataclass(frozen=True)
class Estimate:
    """Holds the estimated cost of a dump.

    exact: the sample was the whole corpus, so tokens are counted, not estimated.
    bytes_by_feature: bytes of all parts.
    seconds: time of the dump.
    pass_seconds: time of the teacher alone over every token. Online distillation takes this time in
        each epoch of each student.
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
    copies: int  # copies of the parts on the disk while the store is sealed

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_by_feature.values()) + self.teacher_bytes

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        about = "" if self.exact else "about "
        corpus = f"{counted(self.tokens, 'teacher token')} of {counted(self.documents, 'document')}"
        yield f"corpus    {about}{corpus}"
        yield f"parts     at most {self.parts:,}"
        for name, size in sorted(self.bytes_by_feature.items(), key=lambda item: -item[1]):
            yield f"bytes     {name:24} {readable(size):>8}, {size / self.tokens:,.2f} per token"
        yield f"bytes     {'teacher':24} {readable(self.teacher_bytes):>8}"
        yield f"bytes     {'all':24} {readable(self.total_bytes):>8}"
        yield (
            f"time      {_duration(self.seconds)} on this device by one process"
            f" ({self.tokens / self.seconds:,.0f} tokens/s, from a sample)"
        )
        if self.seconds > NIGHT:
            limit = float(f"{self.tokens * NIGHT / self.seconds:.2g}")  # the time is an estimate
            yield f"night     --limit {limit:.0f} takes about {_duration(NIGHT)}"
        epochs = self.seconds / self.pass_seconds
        yield (
            f"pays      after {epochs:.1f} epochs of training, over all students: the dump takes as"
            " long as the teacher in that number of epochs without a store"
        )
        twice = " (twice the parts while the store is sealed)" if self.copies > 1 else ""
        free = "unknown space" if self.free is None else readable(self.free)
        yield f"room      {free} free, {readable(self.needed)} needed{twice}"

    @property
    def needed(self) -> float:
        """Return the peak disk usage in bytes."""
        return self.total_bytes + (self.copies - 1) * sum(self.bytes_by_feature.values())

    def check_room(self, out: Path | str) -> None:
        """Raise UserError if the disk has too little free space."""
        if self.free is not None and self.needed > USABLE_SHARE * self.free:
            raise UserError(
                f"{out}: the disk has {readable(self.free)} free, and the store needs"
                f" {readable(self.needed)}; free some space, give an --out on another disk, or"
                " store less (--codec small, fewer features or --views, --limit)"
            )


def estimate(options: DumpOptions, say: Callable[[str], object] = lambda line: None) -> Estimate:
    """Estimate the cost of a dump from a sample, and leave no file behind.

    The corpus is read once; for a classifier or tagger twice, because its labels are checked first.
    Raises UserError for bad input, like `dump`.
    """
    with stoppable(lambda: f"{options.out}: nothing is written yet") as stop:
        # Shared, because an estimate writes nothing: a dump may be running there.
        StoreWriter.check_writable(options.out, shared=True)
        # `_Sample` reads the corpus; checking it before would read it twice.
        with planned(options, say, read_corpus=False) as plan:
            return _estimate(plan, say, stop)


def _estimate(plan: DumpPlan, say: Callable[[str], object], stop: Stop) -> Estimate:
    options, sample_size = plan.options, BATCHES * plan.options.tokens_per_batch
    say(plan.features_line())
    if plan.features.task:
        plan.corpus.check()  # a wrong label is reported here, too
    sample = _Sample(plan.corpus, plan.teacher.tokenizer, options.limit)
    # --limit applies to the documents of `_Sample` and to the estimate, not to the sampled part.
    one_part = replace(options, part_tokens=sample_size, limit=None)
    sampled = replace(plan, corpus=sample, options=one_part)
    parts = cut_parts(sampled, Counter(), stop, sample, None)
    windows = first_part(parts, plan, say)
    # The teacher reads the first part only; the tokens of the others are just counted.
    sample_tokens = count_tokens(windows) + sum(map(count_tokens, parts))
    tokens = round(sample_tokens * sample.characters / sample.sampled_characters)
    if options.limit is not None:
        tokens = min(tokens, options.limit)
    with tempfile.TemporaryDirectory(prefix="teacher-dump-plan-") as folder:
        # The suffix chooses the container, whose metadata are part of the estimate.
        out = Path(folder) / f"sample{PurePath(options.out).suffix}"
        sampled = replace(sampled, options=replace(one_part, out=out))
        windows = _affordable(sampled, windows)
        sampled_tokens = counted(count_tokens(windows), "token")
        say(f"{'sample':9} {sampled_tokens} through the teacher, three times")
        pass_time = _pass_seconds(sampled, windows)
        dump_time = _dump_seconds(sampled, windows, stop)
        # An upper bound: every part but the last has at least `part_tokens` tokens.
        number = ceil(tokens / options.part_tokens)
        by_feature = _bytes_by_feature(sampled, out, windows, tokens, options.part_tokens)
        teacher_bytes = _teacher_bytes(plan, stored_sizes(out))
    size = count_tokens(windows)
    return Estimate(
        documents=sample.documents,
        tokens=tokens,
        parts=number,
        exact=sample.exact,
        bytes_by_feature=by_feature,
        teacher_bytes=teacher_bytes,
        seconds=dump_time / size * tokens,
        pass_seconds=pass_time / size * tokens,
        free=_free(options.out),
        # Sealing copies the parts into a new file before it removes them (FORMAT.md, 9).
        copies=2 if PurePath(options.out).suffix == ".h5" else 1,
    )


def _bytes_by_feature(
    sampled: DumpPlan, out: Path, windows: list[Window], tokens: int, part_tokens: int
) -> dict[str, float]:
    """Estimate the size in bytes of all parts, by feature, from the part that holds the sample."""
    size, parts = count_tokens(windows), ceil(tokens / part_tokens)
    sizes = stored_sizes(out, 0)
    totals = {"metadata": float(sizes.pop(METADATA) * parts)}
    none = (0,) * sampled.features.views
    # Only shapes of rows are needed, so counts of characters, draws and distinct ids can be 0.
    counts = Counts(len(windows), size, 0, 0, none, none)
    specs = part_arrays(sampled.features, counts)
    last = tokens - (parts - 1) * part_tokens
    for name, stored in sizes.items():
        if name.endswith("/logits/distinct"):
            # Different ids of a part grow as the root of its tokens (Heaps' law), as words do.
            factor = parts * max(1.0, min(tokens, part_tokens) / size) ** 0.5
        else:
            full, rest, measured = (
                stored_rows(out, specs[name], number) for number in (part_tokens, last, size)
            )
            factor = ((parts - 1) * full + rest) / measured
        feature = _feature(name)
        totals[feature] = totals.get(feature, 0.0) + stored * factor
    return totals


class _Sample(Corpus):
    """Draws a uniform random sample of a corpus's documents, in random order.

    Reservoir sampling (Vitter 1985, algorithm R) needs one pass, and does not need the number of
    documents.
    """

    def __init__(self, corpus: Corpus, tokenizer: Any, limit: int | None) -> None:
        super().__init__(corpus.sources, corpus.columns)
        # A constant seed, so that a second `--plan` gives the same estimate.
        chance = random.Random(0)
        self.characters = 0
        self._documents: list[Document] = []
        documents = corpus if limit is None else _up_to_limit(corpus, tokenizer, limit)
        # `disable=None`: no bar without a terminal.
        for document in tqdm(documents, desc="sample", unit="doc", disable=None, leave=False):
            self.characters += len(document.text)
            self.documents = document.number + 1
            slot = document.number
            if slot >= DOCUMENTS:
                slot = chance.randrange(slot + 1)
            if slot < DOCUMENTS:
                self._documents[slot : slot + 1] = [_shortened(document)]
        self.sampled_characters = sum(len(document.text) for document in self._documents)
        self.exact = self.sampled_characters == self.characters
        # Without shuffling, the sampled part would hold only the first documents of the corpus.
        chance.shuffle(self._documents)

    def __iter__(self) -> Iterator[Document]:
        return (replace(document, number=i) for i, document in enumerate(self._documents))


def _shortened(document: Document) -> Document:
    """Cut a document to LONGEST characters; for a pair, cut each text."""
    if document.messages:  # its tokens come from the messages, not from the text
        return document
    sides = document.text.split(SEPARATOR, 1)
    return replace(document, text=SEPARATOR.join(side[:LONGEST] for side in sides))


def _up_to_limit(corpus: Corpus, tokenizer: Any, limit: int) -> Iterator[Document]:
    """Yield documents until they have about `limit` tokens, estimated from every EACH-th."""
    characters = seen = tokens = 0
    encode = encoder(tokenizer.backend_tokenizer)
    for document in corpus:
        yield document
        characters += len(document.text)
        if document.number % EACH == 0:
            seen += len(document.text)
            # `tokenizers` refuses lone surrogates with a TypeError.
            text = storable(document.text[:LONGEST], Counter())
            tokens += len(encode([text])[0]) * len(document.text) // len(text)
        if characters * tokens > limit * seen:
            return


def _free(out: Path | str) -> int | None:
    """Return the number of free bytes on the disk of a store; None for a bucket."""
    return shutil.disk_usage(out.resolve().parent).free if isinstance(out, Path) else None


def _affordable(sampled: DumpPlan, windows: list[Window]) -> list[Window]:
    """Return the first windows that the teacher reads within SECONDS, at least PROBE of them.

    The teacher runs over the sample three times: alone, for the calibration, and for the dump.
    """
    probe = windows[:PROBE]
    _pass_seconds(sampled, probe)  # the warm-up
    rate = count_tokens(probe) / _pass_seconds(sampled, probe)
    ends = itertools.accumulate(len(window.ids) for window in windows)
    return windows[: max(PROBE, sum(end <= rate * SECONDS for end in ends))]


def _pass_seconds(sampled: DumpPlan, windows: list[Window]) -> float:
    """Measure the seconds of the teacher alone over the sample."""
    from teachonce.teacher_dump.teacher.forward import forward

    inputs = [w.ids for w in windows]
    batches = length_batches([len(ids) for ids in inputs], sampled.options.tokens_per_batch)
    start = time.perf_counter()
    for _ in forward(sampled.teacher, windows, inputs, batches, 0, Counter()):
        pass
    return time.perf_counter() - start


def _dump_seconds(sampled: DumpPlan, windows: list[Window], stop: Stop) -> float:
    """Dump the sample as one part; return the seconds without the time to create the store."""
    from teachonce.teacher_dump.job.part_writing import dump_part, measured_calibration

    words, teacher = word_counts(sampled), sampled.teacher
    writer = StoreWriter.create_or_resume(
        sampled.options.out,
        identity={},  # hashing the teacher's weights takes seconds, and nobody opens this store
        features=sampled.features,
        calibration=measured_calibration(sampled, windows, ignore_line),
        files=teacher.files(),
        weights=_sampled_weights(teacher) if sampled.options.weights else {},
        head=sampled.stored_head(),
        extras=(words,),
    )
    part, check = NumberedPart(0, 0, windows), lambda tokens: stop.check()
    with closing(writer):
        # Timed from here: what a store holds outside its parts is written once.
        start = time.perf_counter()
        with BackgroundCalls(BATCHES_BEHIND) as behind:
            dump_part(sampled, writer, part, words, Counter(), check, behind)
        return time.perf_counter() - start


def _sampled_weights(teacher: Teacher) -> Iterator[tuple[str, Array]]:
    """Yield weights of at most WEIGHTS bytes in all, but at least one array."""
    size = 0
    for name, array in teacher.weights():
        if size and size + array.nbytes > WEIGHTS:
            return
        size += array.nbytes
        yield name, array


def _teacher_bytes(plan: DumpPlan, outside: dict[str, int]) -> float:
    """Estimate the size in bytes of what is outside the parts.

    outside: the sizes of the sample's arrays by path; sizes of weights are scaled up to all
    weights.
    """
    total = float(sum(outside.values()))
    if plan.options.weights:
        written = {name: array.nbytes for name, array in _sampled_weights(plan.teacher)}
        full = sum(array.nbytes for _, array in plan.teacher.weights())
        stored = sum(outside[f"teacher/weights/{name}"] for name in written)
        total += stored * (full / sum(written.values()) - 1)
    return total


def _feature(name: str) -> str:
    """Return the feature of an array of a part, without the view: `hidden/mean`, `logits`."""
    first, *rest = name.split("/")
    if first.startswith("view"):
        return "/".join(rest[: 2 if rest[0] in ("hidden", "attention") else 1])
    return "text and tokens" if first in ("text", "token") else "/".join([first, *rest[:-1]])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
