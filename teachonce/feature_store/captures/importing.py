"""Import a capture: capture -> sequences -> store, part by part as in a dump."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import Progress, file_versions, identity
from teachonce.feature_store.captures.formats import ImportOptions, format_of
from teachonce.feature_store.captures.proof import ShiftCheck, check_observed, compare_with_model
from teachonce.feature_store.captures.sample import (
    Capture,
    CaptureContents,
    Rows,
    Sample,
    best_first,
    same_length,
)
from teachonce.feature_store.captures.teacher_files import TeacherFiles, open_teacher
from teachonce.feature_store.captures.token_texts import Stretch, choose_tokenizer, stretches
from teachonce.store import EmbeddingSpec, Features, LogitsSpec, StoreWriter
from teachonce.store.format.features import AS_CAPTURED, Calibration
from teachonce.support.arrays import Array, starts
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.packages import software
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.job.dump import count_finished, written_line
from teachonce.teacher_dump.job.features import as_started
from teachonce.teacher_dump.job.option_values import DEFAULT_MAX_LENGTH
from teachonce.teacher_dump.job.parts import gathered

LONGEST = 1 << 20  # most tokens of a sequence: `max_length` in FORMAT.md, 5
UNIT = 0.01  # tolerance of length 1, for vectors that were normalised in bfloat16


@dataclass(frozen=True)
class ImportSummary:
    """Holds the counts that a finished import reports: samples read, cut and lost, tokens left out.

    partial: the number of tokens with fewer than k ids. over: the number of tokens whose top-k
        probabilities sum to 1 or more.
    places: the number of tokens that have both logits and a next token. followed: how many of these
        have the next token among the top-k ids. If tokens and logits belong together, `followed` is
        close to `places`.
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
        """Yield lines about tokens that were left out, and about unusual logits."""
        if self.tokens:
            yield (
                f"left out  {counted(self.tokens, 'token')} that differ if their text is tokenized"
                f" again: {counted(self.lost, 'sample')} of {self.samples:,} completely,"
                f" {self.cut:,} in part"
            )
        elif self.lost or self.cut:
            yield (
                f"texts     left out without a token: {self.lost:,}; truncated to --max-length:"
                f" {self.cut:,}, with vectors of the whole texts"
            )
        if self.partial:
            yield f"logits    {counted(self.partial, 'token')} with fewer than k ids"
        if self.over:
            yield (
                f"logits    {counted(self.over, 'token')} whose top-k probabilities sum to 1 or"
                " slightly more: no probability remains"
            )
        if self.places:
            yield (
                f"check     the next token is among the top-k ids at"
                f" {self.followed / self.places:.0%} of {counted(self.places, 'token')}"
            )


def import_capture(
    options: ImportOptions,
    say: Callable[[str], object] = lambda line: None,
    progress: Progress = lambda items, unit: items,
) -> ImportSummary:
    """Write a store from a capture, or continue a stopped import.

    A store that the same options have finished is left unchanged. Raises UserError for bad input,
    StoreError for a damaged store, Stopped after a signal.
    """
    with stoppable(lambda: written_line(options.target)) as stop:
        stored = StoreWriter.finished(options.target)
        if stored is None:
            # Before the survey, which reads the whole capture and may take an hour.
            StoreWriter.check_writable(options.target)
        capture_format = format_of(options)
        teacher = open_teacher(options.model if options.tokenizer is None else options.tokenizer)
        capture = capture_format.open(options, teacher)
        files = capture.files()
        # Taken before the first read, and compared after the last read.
        versions = file_versions(files)
        source = identity(capture_format.name, options.source, files, progress)
        samples, longest, normalised = _survey(capture, options, stop)
        tokenizer = None
        if capture.contents.vector is None:
            backend = teacher.tokenizer.backend_tokenizer
            tokenizer = choose_tokenizer(backend, capture.samples(), teacher.name)
        features = _features(options, capture.contents, teacher, longest, normalised)
        teacher_files = teacher.files(features.max_length)
        if tokenizer:
            # The stored tokenizer must give the stored tokens, so the chosen one is stored: it may
            # put no special tokens around a text.
            teacher_files["tokenizer.json"] = tokenizer.file
        # Two imports with the same identity write the same store.
        described = {
            "teacher": {"id": teacher.name, "captured_by": capture_format.name},
            "tokenizer_hash": hashlib.sha256(teacher_files["tokenizer.json"]).hexdigest(),
            "corpus": {"sources": [source]},
            "arguments": {"part_tokens": options.part_tokens, **capture.settings},
        }
        say(f"capture   {capture_format.name}, {samples:,} samples, {_describe(features)}")
        if stored:
            count_finished(options.target, stored, described, features)
            say(f"{options.target}: was finished before, by the same command; nothing to do")
            return ImportSummary(capture_format.name, finished_before=True)
        if options.model is not None:
            say(compare_with_model(capture, samples, options.model, stop.check))
        tally: Counter[str] = Counter()
        if tokenizer:
            sequences = stretches(capture.samples(), tokenizer, tally)
        else:
            sequences = _tokenized_texts(capture, teacher, features.max_length, tally)
        parts = gathered(sequences, options.part_tokens, None)
        _write(options, parts, described, features, teacher_files, tally, stop)
        # Both passes read the files: after a change the store has rows that the first pass did not
        # check.
        if file_versions(files) != versions:
            raise UserError(
                f"{options.source}: was changed while it was being read; remove {options.target},"
                " and run the command again while nothing writes to the capture"
            )
    return ImportSummary(capture_format.name, **dict[str, Any](tally))


def _survey(capture: Capture, options: ImportOptions, stop: Stop) -> tuple[int, int, bool]:
    """Read all ids and all vectors before anything is written.

    Returns the number of samples, the tokens of the longest one, and whether all vectors have
    length 1. Raises UserError for a capture without samples, for ids beyond the vocabulary, for a
    sample that is too long, for logits that are not of the next token, and as `Capture.samples`
    does.
    """
    samples, longest, normalised = 0, 1, capture.contents.vector is not None
    vocabulary = capture.contents.vocabulary
    # Rows of a teacher with random weights may look shifted. --model compares them with the
    # teacher's own rows instead.
    shift = ShiftCheck() if options.model is None else None
    for sample in capture.samples():
        stop.check()
        samples += 1
        _check_rows(sample, capture.contents, shift)
        if sample.ids is None:
            vector = sample.rows().vector
            assert vector is not None
            normalised &= abs(float(np.linalg.norm(vector)) - 1) < UNIT
            continue
        longest = max(longest, len(sample.ids))
        bad = (sample.ids < 0) | (sample.ids >= (vocabulary or 1))
        if bad.any():
            raise UserError(
                f"{sample.where}: token id {sample.ids[bad.argmax()]:,} is beyond the vocabulary of"
                f" {vocabulary or 0:,}; give the tokenizer of the teacher that was captured"
            )
    if shift is not None:
        shift.check(options.source)
    if not samples:
        raise UserError(
            f"{options.source}: holds no sample, so there is nothing to import; check the path"
        )
    if longest > LONGEST:
        raise UserError(
            f"{options.source}: a sample has {longest:,} tokens, and a store takes {LONGEST:,} at"
            " most; capture shorter samples"
        )
    return samples, longest, normalised


def _check_rows(sample: Sample, contents: CaptureContents, shift: ShiftCheck | None) -> None:
    """Raise UserError if the logits of a sample cannot be read, or contradict its tokens. Add the
    sample to `shift`, if given."""
    if not contents.topk:
        return  # `samples` has checked states already, and `_survey` reads vectors itself
    rows, vocabulary = sample.rows(), contents.vocabulary or 1
    if rows.topk is None or sample.ids is None:
        return
    # This tally is discarded, because the second pass counts the same rows for the summary.
    best, logprobs, rest = best_first(
        *rows.topk, contents.topk, sample.where, Counter(), vocabulary
    )
    same_length(sample.ids, len(best), "logits", sample.where)
    if rows.observed is not None:
        following = sample.ids[1:], best[:-1], logprobs[:-1], rows.observed[:-1]
        check_observed(*following, sample.where)
    if shift is not None:
        shift.add(sample.ids, best, logprobs, rest, vocabulary)


def _features(
    options: ImportOptions,
    contents: CaptureContents,
    teacher: TeacherFiles,
    longest: int,
    normalised: bool,
) -> Features:
    """Return the features of the store. `longest` and `normalised` are results of `_survey`."""
    vocabulary = contents.vocabulary or teacher.vocabulary
    vector, logits, max_length = None, None, longest
    if contents.vector:
        vector = EmbeddingSpec(contents.vector, AS_CAPTURED, options.prompt or "", normalised)
        limit = min(filter(None, (DEFAULT_MAX_LENGTH, teacher.limit)))
        max_length = options.max_length or limit
    if contents.topk:
        # Tier topk has at most V ids a token (FORMAT.md, section 5).
        size, observed = min(contents.topk, vocabulary), contents.observed
        logits = LogitsSpec("topk", size, next_token=True, observed=observed, ranked=True)
    features = Features(
        max_length=max_length,
        # The format requires a width also of a store without states (FORMAT.md, section 5).
        width=contents.width or teacher.width or contents.vector or 1,
        vocabulary=vocabulary,
        codec=options.codec,
        hidden=contents.hidden,
        logits=logits,
        embedding=vector,
    )
    return as_started(features, StoreWriter.peek(options.target))


def _describe(features: Features) -> str:
    """Describe the features that the store is going to hold."""
    if vector := features.embedding:
        return f"vectors of width {vector.width}" + (", of length 1" if vector.normalised else "")
    if logits := features.logits:
        return f"topk:{logits.size} of {features.vocabulary:,}, of the next token"
    return f"hidden {', '.join(features.hidden)} (width {features.width})"


def _tokenized_texts(
    capture: Capture, teacher: TeacherFiles, max_length: int, tally: Counter[str]
) -> Iterator[Stretch]:
    """Yield the sequence of each text, truncated to `max_length` tokens."""
    from teachonce.teacher_dump.windows.sequences import iter_truncated

    # `iter_truncated` tokenizes batches: several samples are read before the first window comes.
    waiting: dict[int, Sample] = {}
    counters: Counter[str] = Counter()

    def documents() -> Iterator[Document]:
        for number, sample in enumerate(capture.samples()):
            tally["samples"] += 1
            waiting[number] = sample
            yield Document(sample.text or "", sample.where, number)

    for window in iter_truncated(documents(), teacher.tokenizer, max_length, counters=counters):
        tally["cut"] += window.lost > 0
        for number in [n for n in waiting if n < window.document]:
            del waiting[number]  # a text without a token gives no window
        yield Stretch(window, waiting.pop(window.document), 0)
    tally["lost"] = counters["no_tokens"]


def _write(
    options: ImportOptions,
    parts: Iterator[list[Stretch]],
    described: dict[str, Any],
    features: Features,
    files: dict[str, bytes],
    tally: Counter[str],
    stop: Stop,
) -> None:
    """Write the parts that are not published yet, and seal the store."""
    from teachonce.teacher_dump.job.parts import check_published

    # Before the store is created: a capture without a text leaves nothing at the target, and the
    # calibration is measured over this part.
    first = next(parts, None)
    if first is None:
        raise UserError(
            f"{options.source}: no text of the capture has a token, so there is nothing to import;"
            " check --tokenizer"
        )
    writer = StoreWriter.create_or_resume(
        options.target,
        identity=described,
        features=features,
        calibration=_calibration(options, first, features),
        files=files,
        software=software(),
    )
    with closing(writer):
        for number, part in enumerate(chain([first], parts)):
            if number in writer.published:
                check_published(writer, number, [stretch.window for stretch in part])
                for stretch in part if features.logits else ():
                    # Already published, but counted: the summary describes the whole capture.
                    _logits(stretch, stretch.sample.rows(), features, tally)
            else:
                with stop.deferred():  # a part is written completely or not at all
                    _write_part(writer, number, part, tally)
                stop.check()
        writer.seal()


def _calibration(
    options: ImportOptions, part: Sequence[Stretch], features: Features
) -> Calibration:
    """Return the calibration of the unfinished store, or measure it over the first part."""
    if not features.hidden:
        return {}
    # Published parts are encoded relative to the stored values, so a resumed import reuses them.
    unfinished = StoreWriter.peek(options.target)
    if unfinished and (stored := StoreWriter.calibration(options.target)):
        return stored
    from teachonce.teacher_dump.job.part_writing import CALIBRATION_TOKENS, mean_and_deviation

    # Every n-th sequence instead of the first ones: neighbours in a corpus are alike.
    step = max(1, sum(len(stretch.ids) for stretch in part) // CALIBRATION_TOKENS)
    states: dict[str, list[Array]] = {name: [] for name in features.hidden}
    for stretch in part[::step]:
        rows = stretch.sample.rows().hidden
        for name, values in states.items():
            values.append(rows[name][stretch.begin : stretch.begin + len(stretch.ids)])
    return {name: mean_and_deviation(values) for name, values in states.items()}


def _write_part(
    writer: StoreWriter, number: int, part: Sequence[Stretch], tally: Counter[str]
) -> None:
    """Encode a part and publish it."""
    from teachonce.teacher_dump.job.parts import sequences_of

    features = writer.features
    lengths = np.array([len(stretch.ids) for stretch in part])
    start = starts(lengths)
    part_writer = writer.part(number, lengths)
    part_writer.set_sequences(sequences_of([stretch.window for stretch in part], features))
    for index, stretch in enumerate(part):
        at = np.arange(start[index], start[index + 1])
        span = slice(stretch.begin, stretch.begin + len(at))
        rows = stretch.sample.rows()
        if features.embedding:
            assert rows.vector is not None
            part_writer.put_embedding([index], rows.vector[None])
        for name in features.hidden:
            part_writer.put_hidden(0, name, at, rows.hidden[name][span])
        if features.logits:
            part_writer.put_logits(0, at, _logits(stretch, rows, features, tally))
    writer.publish(part_writer)


def _logits(
    stretch: Stretch, rows: Rows, features: Features, tally: Counter[str]
) -> dict[str, Array]:
    """Return the logits of a stretch of tokens for `PartWriter.put_logits`, and count in `tally`
    the next tokens that are among the top-k ids."""
    assert rows.topk is not None and features.logits is not None
    size, vocabulary = features.logits.size, features.vocabulary
    span = slice(stretch.begin, stretch.begin + len(stretch.ids))
    ids, logprobs = (values[span] for values in rows.topk)
    where = stretch.sample.where
    same_length(stretch.ids, len(ids), "logits", where)
    best, logprobs, rest = best_first(ids, logprobs, size, where, tally, vocabulary)
    following = stretch.ids[1:, None]
    tally["places"] += len(following)
    tally["followed"] += int((best[:-1] == following).any(axis=1).sum())
    # Log-probabilities are logits whose log-partition is 0; the teacher's is unknown.
    logits = {"ids": best, "logprobs": logprobs, "rest": rest, "log_partition": np.zeros(len(best))}
    if features.logits.observed and rows.observed is not None:
        # Rounding may put a log-probability above 0; `check_observed` has bounded by how much.
        logits["observed"] = np.minimum(rows.observed[span], 0)
    return logits
