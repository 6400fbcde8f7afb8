"""Check that a part's arrays keep the laws of values, which are rules for numbers (FORMAT.md,
section 6): for a whole part, or in a thread while a stream reads it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from teachonce.store.errors import NO_NUMBERS, StoreError
from teachonce.store.format.codecs.levels import bound
from teachonce.store.format.features import CONTEXT, Calibration
from teachonce.store.format.layout import EMBEDDING, span_kind
from teachonce.store.format.sequences import wrong_gold
from teachonce.store.format.value_laws import (
    Violation,
    find_violation,
    joint_violations,
    out_of_range,
    row_violation,
)
from teachonce.store.read.part import PartReader, row_slices
from teachonce.support.arrays import Array

LENGTH_SLACK = 0.02  # of a vector's length 1, for teachers in bfloat16
ROWS = 4096  # tokens of the sequences that are compared at once
BY_TEXT = ("token/id", "token/begin", "token/end")  # checked by `_broken_tokens`


def check_part(part: PartReader, calibration: Calibration) -> list[str]:
    """List a line for each rule that a part breaks. Raises StoreError if it cannot be read."""
    texts = part.texts(0, part.part.counts.sequences)
    lengths = np.array([len(text) for text in texts], np.int64)
    problems = [*_broken_tokens(part, lengths)]
    for view in range(part.features.views):
        problems += _broken_spans(part, view, lengths)
    problems += _broken_context(part)
    problems += [*_broken_pairs(part, texts), *_broken_task(part), *_broken_vectors(part, texts)]
    single = _broken_arrays(part, calibration)
    problems += [single[name] for name in single]
    intact = [name for name in part.names() if name not in single]
    problems += _broken_together(part, intact) if len(problems) == len(single) else []
    return [f"{part.where}: {problem}" for problem in problems]


def check_values(part: PartReader, calibration: Calibration) -> None:
    """Raise StoreError, with the first bad value, if a part breaks a law of values (FORMAT.md,
    section 6)."""
    single = _broken_arrays(part, calibration)
    for line in single.values() or _broken_together(part, part.names()):
        raise StoreError(f"{part.where}: {line}; {NO_NUMBERS}")


def _broken_tokens(part: PartReader, lengths: Array) -> list[str]:
    ids, begin, end = (part.all(f"token/{key}") for key in ("id", "begin", "end"))
    special, limit = part.all("token/special"), np.repeat(lengths, np.diff(part.token_start))
    _ = part.square_start  # raises for wrong sizes of the attention maps
    laws = {
        ("token ids", "outside the vocabulary"): ids >= part.features.vocabulary,
        ("offsets", "outside the text"): (begin < 0) | (begin > end) | (end > limit),
        ("special tokens", "with offsets"): special & ((begin != 0) | (end != 0)),
    }
    return [
        line_of_token(part, name, int(bad.argmax()), problem)
        for (name, problem), bad in laws.items()
        if bad.any()
    ]


def _broken_spans(part: PartReader, view: int, lengths: Array) -> list[str]:
    start, spans = part.spans(view, 0, len(lengths))
    kind = span_kind(view)
    if start[-1] != part.part.counts.spans[view]:
        return [f"{kind.group}/start does not end at the number of {kind.plural}"]
    begin, end, number = spans.T
    previous = np.zeros(len(spans), np.int64)
    previous[1:] = end[:-1]
    heads = start[:-1]
    # A sequence without words at the end of the part begins behind the last word.
    previous[heads[heads < len(spans)]] = 0
    limit = np.repeat(lengths, np.diff(start))
    bad = (begin < previous) | kind.too_short(begin, end) | (end > limit)
    bad |= ~np.isin(number, kind.numbers)
    return [f"{kind.group} is not ascending {kind.plural} of the text"] if bad.any() else []


def _broken_arrays(part: PartReader, calibration: Calibration) -> dict[str, str]:
    """Return, by array name, a line for each array that breaks a law by itself. Arrays are read
    some rows at a time."""
    lines = {}
    for name in part.names():
        if name in BY_TEXT:
            continue
        # Slices may be shorter than BLOCK rows, which take 64 MiB for 4096 float32 channels, in
        # each of 16 threads.
        for begin, values in row_slices(part.array(name), 1):
            if name.endswith("/logits/places"):
                most = part.array(f"{name.removesuffix('places')}distinct").shape[0]
                problem = f"has an index that is not one of its {most} distinct ids"
                violation = out_of_range(values, 0, most - 1, problem)
            else:
                violation = find_violation(part.features, calibration, name, values)
            if violation:
                lines[name] = line_of(
                    part, name, Violation(begin + violation.row, violation.problem)
                )
                break
    return lines


def line_of(part: PartReader, name: str, violation: Violation) -> str:
    """Describe a violation, in a row of the array `name`, with its place in the part."""
    row, start = violation.row, part.token_start
    if name in (CONTEXT, "sequence/label", f"{EMBEDDING}/values", f"{EMBEDDING}/scale") or (
        part.features.task and name.endswith("/classes/values")
    ):
        return f"{name} {violation.problem} (sequence {row} of the part)"
    if name.endswith("/logits/distinct"):
        return f"{name} {violation.problem} (entry {row})"
    if part.array(name).shape[0] == part.part.counts.squares and "/attention/" in name:
        sequence = int(np.searchsorted(part.square_start, row, "right")) - 1
        row = int(start[sequence]) + (row - int(part.square_start[sequence])) // int(
            np.diff(start)[sequence]
        )
    elif name.endswith(("/logits/ids", "/logits/counts")) and part.array(name).shape[1:] == ():
        view = int(name.split("/")[0].removeprefix("view"))
        draws = part.draw_start(view, 0, part.part.counts.tokens)
        row = max(0, int(np.searchsorted(draws, row, "right")) - 1)
    return line_of_token(part, name, row, violation.problem)


def line_of_token(part: PartReader, name: str, row: int, problem: str) -> str:
    """Describe a violation at a token of a part; `row` is the token's number in the part."""
    sequence = int(np.searchsorted(part.token_start, row, "right")) - 1
    token = row - int(part.token_start[sequence])
    return f"{name} {problem} (sequence {sequence} of the part, token {token})"


def check_offsets(part: PartReader) -> None:
    """Raise StoreError unless a part's token ids are in the vocabulary and its offsets in the
    texts."""
    texts = part.texts(0, part.part.counts.sequences)
    lengths = np.array([len(text) for text in texts], np.int64)
    for line in _broken_tokens(part, lengths):
        raise StoreError(f"{part.where}: {line}; {NO_NUMBERS}")


def _broken_together(part: PartReader, names: Container[str]) -> Iterator[str]:
    """Yield, for each group of arrays that break a law together, a line about the first such
    token."""
    tokens = range(0, part.part.counts.tokens, ROWS)
    # Runs of whole sequences of about ROWS tokens each.
    firsts = np.unique(np.searchsorted(part.token_start[:-1], tokens, "right") - 1)
    edges, reported = [*firsts.tolist(), part.part.counts.sequences], set[str]()
    for view in range(part.features.views):
        for first, last in pairwise(edges):
            for name, violation in _joint(part, view, names, first, last):
                if name not in reported:
                    reported.add(name)
                    row = int(part.token_start[first]) + violation.row
                    yield line_of_token(part, violation.leaf_of(name), row, violation.problem)


def _joint(
    part: PartReader, view: int, names: Container[str], first: int, last: int
) -> Iterator[tuple[str, Violation]]:
    """Yield what arrays of a view violate together in sequences first..last; see
    `joint_violations`. Arrays that `names` lacks are left out."""
    prefix, spec, counts = f"view{view}", part.features.logits, part.part.counts
    rows, squares = (
        start[[first, last]].tolist() for start in (part.token_start, part.square_start)
    )
    keys = ("ids", "logprobs", "rest") if spec and spec.tier == "topk" else ()
    paths = [f"{prefix}/logits/{key}" for key in keys]
    if spec and spec.observed:
        paths += ["token/id", f"{prefix}/logits/observed"]
    stored = {
        path: part.read(path, *rows)
        for path in paths
        if all(name in names for name in part.stored(path))
    }
    for path in (f"{prefix}/attention/{name}/values" for name in part.features.attention):
        if path in names:
            stored[path] = part.read(path, *squares)
    draws, sampled = None, [f"{prefix}/logits/{key}" for key in ("ids", "start", "counts")]
    if spec and spec.tier == "sample" and all(name in names for name in sampled):
        start = part.draw_start(view, *rows)
        if (not first and start[0]) or (
            last == counts.sequences and start[-1] != counts.draws[view]
        ):
            yield sampled[0], Violation(0, "does not end at the number of drawn ids")
        draws = (start - start[0], *part.draws(view, *rows)[1:])
    lengths = np.diff(part.token_start[first : last + 1])
    yield from joint_violations(part.features, prefix, stored, lengths, draws)


def _broken_pairs(part: PartReader, texts: list[str]) -> list[str]:
    """List the problems of a part of pairs: each text must have one separator, outside of all
    tokens and masked words."""
    separator = part.features.separator
    if separator is None:
        return []
    # A text without one separator is the only problem reported: spans have no position to compare
    # with.
    if several := [n for n, text in enumerate(texts) if text.count(separator) != 1]:
        return [f"text/utf8 of sequence {several[0]} of the part needs one {separator!r}"]
    position, problems = np.array([text.index(separator) for text in texts], np.int64), []
    spans = {"tokens": (part.all("token/begin"), part.all("token/end"), part.token_start)}
    for view in range(1, part.features.views):
        start, words = part.spans(view, 0, len(texts))
        spans[f"view{view}/mask"] = words[:, 0], words[:, 1], start
    for group, (begin, end, start) in spans.items():
        middle = np.repeat(position, np.diff(start))
        if ((begin <= middle) & (end > middle)).any():
            problems.append(f"{group}: some cover the separator of their pair")
    return problems


def _broken_context(part: PartReader) -> list[str]:
    if not part.features.context:
        return []
    bad = part.all(CONTEXT) >= np.diff(part.token_start)
    where = f"(sequence {int(bad.argmax())} of the part)"
    return [f"{CONTEXT} leaves no token that is not context {where}"] if bad.any() else []


def _broken_task(part: PartReader) -> list[str]:
    task = part.features.task
    if not task or not wrong_gold(task, part.all(task.gold), part.all("token/special")).any():
        return []
    return [f"{task.gold} holds a number that is not a label of the {task.kind}"]


def _broken_vectors(part: PartReader, texts: list[str]) -> list[str]:
    """List the problems of a part's embeddings.

    If the features say `normalised`, vectors must have length 1. Every text must start with the
    prompt.
    """
    if (spec := part.features.embedding) is None:
        return []
    problems, codec = [], part.features.level.embedding
    stored = {key: part.all(f"{EMBEDDING}/{key}") for key in codec.names}
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale
        vectors = codec.decode(stored, (spec.width,))
    # NaN and infinity are reported by `_broken_arrays`.
    if spec.normalised and row_violation(vectors) is None:
        lengths = np.linalg.norm(vectors, axis=1)
        # By the triangle inequality, a length errs by at most the length of the vector of errors.
        slack = LENGTH_SLACK + np.linalg.norm(
            bound(part.features.level, "embedding", vectors), axis=1
        )
        if (bad := np.abs(lengths - 1) > slack).any():
            problems.append(
                f"{EMBEDDING}/values of sequence {int(bad.argmax())} of the part do not have length"
                " 1"
            )
    if other := [n for n, text in enumerate(texts) if not text.startswith(spec.prompt)]:
        problems.append(f"text/utf8 of sequence {other[0]} of the part lacks the prompt")
    return problems


class ReadingCheck:
    """Checks arrays of parts in a thread while a stream reads them.

    It compares checksums, then checks that offsets lie in the texts. `sound` is the set of arrays
    (part number, path) that passed before; arrays that pass are added.
    """

    def __init__(self, sound: set[tuple[int, str]]) -> None:
        # Two sets: a stream may end before its checks have, and the next stream must not take
        # submitted arrays for sound ones.
        self._sound, self._submitted = sound, set(sound)
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._running: list[Future[None]] = []

    def submit(self, part: PartReader, names: Iterable[str]) -> None:
        """Start to check arrays of a part that were not checked before; return at once."""
        new: list[str] = []
        for name in names:
            key = part.part.number, name
            if key not in self._submitted:
                self._submitted.add(key)
                self._running.append(self._thread.submit(self._check, part, name))
                new.append(name)
        # Queued after the checksums in the single thread, so that damage is reported as damage,
        # not as wrong offsets.
        if "token/begin" in new:
            self._running.append(self._thread.submit(check_offsets, part))

    def _check(self, part: PartReader, name: str) -> None:
        part.check(name)
        self._sound.add((part.part.number, name))

    def raise_errors(self, wait: bool = False) -> None:
        """Raise the StoreError of a finished check; with `wait`, wait for all checks first."""
        while self._running and (wait or self._running[0].done()):
            self._running.pop(0).result()

    def close(self) -> None:
        """Cancel the checks that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
