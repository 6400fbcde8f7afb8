"""The job of an import: capture -> sequences -> store, one part after the other, as in a dump."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import Progress, identity, stamps
from teachonce.feature_store.captures.formats import Format, ImportOptions, format_of
from teachonce.feature_store.captures.sample import (
    Capture,
    Held,
    Rows,
    Sample,
    best_first,
    same_length,
)
from teachonce.feature_store.captures.teacher_files import TeacherFiles, open_teacher
from teachonce.feature_store.captures.token_texts import Spelling, Stretch, spelling_of, stretches
from teachonce.store import EmbeddingSpec, Features, LogitsSpec, StoreWriter
from teachonce.store.format.features import Calibration
from teachonce.support.arrays import Array, starts
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.installed import software
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.job.dump import check_finished, written_line
from teachonce.teacher_dump.job.options import DEFAULT_MAX_LENGTH
from teachonce.teacher_dump.job.parts import gathered

COUNTS = ("samples", "cut", "lost", "tokens", "partial", "over", "places", "followed")
LONGEST = 1 << 20  # tokens of a sequence that the format allows
UNIT = 0.01  # of length 1: vectors that were normalised in bfloat16


@dataclass(frozen=True)
class Survey:
    """What a first pass over a capture tells of it."""

    samples: int
    longest: int
    normalised: bool


@dataclass(frozen=True)
class ImportSummary:
    """The counts that a finished import reports: samples read, cut and lost, tokens left out.

    `followed` is at how many of `places` tokens the next token is among the kept ids; of a capture
    whose tokens and logits belong together it is at most of them.
    """

    format: str
    samples: int = 0
    cut: int = 0
    lost: int = 0
    tokens: int = 0
    partial: int = 0
    over: int = 0
    places: int = 0
    followed: int = 0
    finished_before: bool = False

    def lines(self) -> Iterator[str]:
        """Tell what was left out, and what a reader of the store should know."""
        if self.tokens:
            yield (
                f"left out  {counted(self.tokens, 'token')} that the tokenizer does not give of"
                f" their text: {counted(self.lost, 'sample')} of {self.samples:,} whole,"
                f" {self.cut:,} in part"
            )
        elif self.lost or self.cut:
            yield (
                f"texts     {self.lost:,} without a token left out, {self.cut:,} longer than"
                " --max-length cut; vectors are of the whole text"
            )
        if self.partial:
            yield f"logits    {counted(self.partial, 'token')} with fewer ids than the most"
        if self.over:
            yield (
                f"logits    {counted(self.over, 'token')} whose kept ids sum to 1 or a little more:"
                " nothing is left over"
            )
        if self.places:
            yield (
                f"check     the token that follows is among the kept ones at"
                f" {self.followed / self.places:.0%} of {counted(self.places, 'token')}"
            )


def import_capture(
    options: ImportOptions,
    say: Callable[[str], object] = lambda line: None,
    progress: Progress = lambda items, unit: items,
) -> ImportSummary:
    """Make a store of a capture, or go on with one that was stopped; one that the same words have
    finished stays as it is.

    Raises UserError for bad input, StoreError for a store that is damaged, Stopped after a signal.
    """
    with stoppable(lambda: written_line(options.target)) as stop:
        stored = StoreWriter.finished(options.target)
        if stored is None:
            StoreWriter.check_writable(options.target)
        chosen = format_of(options)
        teacher = open_teacher(options.tokenizer)
        capture = chosen.open(options, teacher)
        files = capture.files()
        before = stamps(files)
        source = identity(chosen.name, options.source, files, progress)
        survey = _survey(capture, stop)
        spelling = None
        if capture.held.vector is None:
            backend = teacher.tokenizer.backend_tokenizer
            spelling = spelling_of(backend, capture.samples(), teacher.name)
        features = features_of(options, capture, teacher, survey)
        held = teacher.files(features.max_length)
        if spelling:
            held["tokenizer.json"] = spelling.file
        described = _identity(chosen, options, capture, teacher.name, source, held)
        say(f"capture   {chosen.name}, {survey.samples:,} samples, {_told(features)}")
        if stored:
            check_finished(options.target, stored, described, features)
            say(f"{options.target}: was finished before, by the same command; nothing to do")
            return ImportSummary(chosen.name, finished_before=True)
        tally: Counter[str] = Counter()
        parts = _parts(options, capture, teacher, spelling, features, tally)
        _write(options, parts, features, described, held, tally, stop)
        if stamps(files) != before:
            raise UserError(
                f"{options.source}: was changed while it was read; remove {options.target}, and"
                " type the command again with files that nobody changes"
            )
    counts: dict[str, Any] = {key: tally[key] for key in COUNTS}
    return ImportSummary(chosen.name, **counts)


def _survey(capture: Capture, stop: Stop) -> Survey:
    """Read all ids, and all vectors. Raises UserError for ids beyond the vocabulary, for a sample
    that is too long, and as the capture does."""
    samples, longest, normalised = 0, 1, capture.held.vector is not None
    vocabulary = capture.held.vocabulary
    for sample in capture.samples():
        stop.check()
        samples += 1
        _check_rows(sample, capture.held)
        if sample.ids is None:
            vector = _vector(sample)
            normalised &= abs(float(np.linalg.norm(vector)) - 1) < UNIT
            continue
        longest = max(longest, len(sample.ids))
        bad = (sample.ids < 0) | (sample.ids >= (vocabulary or 1))
        if bad.any():
            raise UserError(
                f"{sample.where}: token id {sample.ids[bad.argmax()]:,} is beyond the vocabulary of"
                f" {vocabulary or 0:,}; give the tokenizer of the teacher that was captured"
            )
    if not samples:
        raise UserError("the capture holds no sample; nothing to import")
    if longest > LONGEST:
        raise UserError(f"a sample of {longest:,} tokens: a store takes {LONGEST:,} at most")
    return Survey(samples, longest, normalised)


def _check_rows(sample: Sample, held: Held) -> None:
    """Raise UserError where the logits of a sample cannot be read: before anything is written."""
    if not held.kept:
        return  # `samples` has looked at states, and what needs a vector reads it
    kept = sample.rows().kept
    if kept is not None:
        best_first(*kept, held.kept, sample.where, Counter(), held.vocabulary or 1)


def _vector(sample: Sample) -> Array:
    """Return the vector of a sample. Raises UserError if a number of it is not finite."""
    found = sample.rows().vector
    assert found is not None
    return found


def features_of(
    options: ImportOptions, capture: Capture, teacher: TeacherFiles, survey: Survey
) -> Features:
    """Return the features of the store that a capture gives."""
    held = capture.held
    vector = held.vector and EmbeddingSpec(held.vector, "as captured", "", survey.normalised)
    longest = min(filter(None, (DEFAULT_MAX_LENGTH, teacher.limit)))
    vocabulary = held.vocabulary or teacher.vocabulary
    logits = held.kept and LogitsSpec("topk", min(held.kept, vocabulary), next_token=True)
    return Features(
        max_length=(options.max_length or longest) if vector else survey.longest,
        width=held.width or teacher.width or held.vector or 1,
        vocabulary=vocabulary,
        codec=options.codec,
        hidden=held.hidden,
        logits=logits or None,
        embedding=vector or None,
    )


def _told(features: Features) -> str:
    """Tell what the store is going to hold."""
    if vector := features.embedding:
        return f"vectors {vector.width} wide" + (", of length 1" if vector.normalised else "")
    if logits := features.logits:
        return f"topk:{logits.size} of {features.vocabulary:,}, each of the token after"
    return f"hidden {', '.join(features.hidden)} ({features.width} wide)"


def _identity(
    chosen: Format,
    options: ImportOptions,
    capture: Capture,
    name: str,
    source: dict[str, Any],
    files: dict[str, bytes],
) -> dict[str, Any]:
    """Describe what the store is made of: two imports that share it are equal."""
    return {
        "teacher": {"id": name, "captured_by": chosen.name},
        "tokenizer_hash": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
        "corpus": {"sources": [source]},
        "arguments": {"part_tokens": options.part_tokens, **capture.settings},
    }


def _parts(
    options: ImportOptions,
    capture: Capture,
    teacher: TeacherFiles,
    spelling: Spelling | None,
    features: Features,
    tally: Counter[str],
) -> Iterator[list[Stretch]]:
    """Gather the sequences of a capture into parts."""
    if spelling is not None:
        found = stretches(capture.samples(), spelling, tally)
    else:
        found = _of_texts(capture, teacher, features.max_length, tally)
    return gathered(found, options.part_tokens, None)


def _of_texts(
    capture: Capture, teacher: TeacherFiles, max_length: int, tally: Counter[str]
) -> Iterator[Stretch]:
    """Yield the sequence of each text, or the beginning of one that is longer than `max_length`."""
    from teachonce.teacher_dump.windows.truncating import iter_truncated

    waiting: dict[int, Sample] = {}
    counters: Counter[str] = Counter()

    def documents() -> Iterator[Document]:
        for number, sample in enumerate(capture.samples()):
            tally["samples"] += 1
            waiting[number] = sample
            yield Document(sample.text or "", sample.where, number)

    for window in iter_truncated(documents(), teacher.tokenizer, max_length, counters=counters):
        tally["cut"] += window.lost > 0
        for number in [each for each in waiting if each < window.document]:
            del waiting[number]  # without a token
        yield Stretch(window, waiting.pop(window.document), 0)
    tally["lost"] = counters["no_tokens"]


def _write(
    options: ImportOptions,
    parts: Iterator[list[Stretch]],
    features: Features,
    described: dict[str, Any],
    files: dict[str, bytes],
    tally: Counter[str],
    stop: Stop,
) -> None:
    """Write the parts that are not published yet, and seal the store."""
    from teachonce.teacher_dump.job.parts import check_published

    first = next(parts, None)
    if first is None:
        raise UserError(f"{options.source}: no text with a token in the capture; nothing to import")
    with closing(
        StoreWriter.create_or_resume(
            options.target,
            identity=described,
            features=features,
            calibration=_calibration(options, first, features),
            files=files,
            software=software(),
        )
    ) as writer:
        part: list[Stretch] | None = first
        number = 0
        while part is not None:
            if number in writer.published:
                check_published(writer, number, [each.window for each in part])
            else:
                with stop.deferred():
                    _write_part(writer, number, part, tally)
                stop.check()
            part, number = next(parts, None), number + 1
        writer.seal()


def _calibration(
    options: ImportOptions, part: Sequence[Stretch], features: Features
) -> Calibration:
    """Return that of an unfinished store, or measure it over the first part."""
    if not features.hidden:
        return {}
    begun = StoreWriter.peek(options.target)
    if begun and (found := StoreWriter.calibration(options.target)):
        return found
    from teachonce.teacher_dump.job.part_writing import CALIBRATION_TOKENS, mean_and_deviation

    step = max(1, sum(len(each.ids) for each in part) // CALIBRATION_TOKENS)
    states: dict[str, list[Array]] = {name: [] for name in features.hidden}
    for each in part[::step]:
        rows = each.sample.rows().hidden
        for name, values in states.items():
            values.append(rows[name][each.begin : each.begin + len(each.ids)])
    return {name: mean_and_deviation(values) for name, values in states.items()}


def _write_part(
    writer: StoreWriter, number: int, part: Sequence[Stretch], tally: Counter[str]
) -> None:
    from teachonce.teacher_dump.job.parts import sequences_of

    features = writer.features
    lengths = np.array([len(each.ids) for each in part])
    start = starts(lengths)
    made = writer.part(number, lengths)
    made.set_sequences(sequences_of([each.window for each in part], features))
    for place, each in enumerate(part):
        at = np.arange(start[place], start[place + 1])
        span = slice(each.begin, each.begin + len(at))
        if features.embedding:
            made.put_embedding([place], _vector(each.sample)[None])
            continue
        rows = each.sample.rows()
        for name in features.hidden:
            made.put_hidden(0, name, at, rows.hidden[name][span])
        if features.logits:
            ids, logprobs, rest = _kept(each, rows, span, features, tally)
            made.put_topk(0, at, ids, logprobs, rest, np.zeros(len(at), np.float32))
    writer.publish(made)


def _kept(
    each: Stretch, rows: Rows, span: slice, features: Features, tally: Counter[str]
) -> tuple[Array, Array, Array]:
    assert rows.kept is not None and features.logits is not None
    size, vocabulary = features.logits.size, features.vocabulary
    ids, logprobs = (values[span] for values in rows.kept)
    where = each.sample.where
    same_length(each.ids, len(ids), "logits", where)
    best = best_first(ids, logprobs, size, where, tally, vocabulary)
    following = each.ids[1:, None]
    tally["places"] += len(following)
    tally["followed"] += int((best[0][:-1] == following).any(axis=1).sum())
    return best
