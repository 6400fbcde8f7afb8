"""Encode one part: rows are put in any order into buffers, and the buffers are returned as
arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.errors import StoreError
from teachonce.store.format.codecs.built_in import rank_ids
from teachonce.store.format.features import Calibration, Features, LogitsSpec
from teachonce.store.format.layout import EMBEDDING, Counts, count_dtype, part_arrays, span_kind
from teachonce.store.format.sequences import Sequences, encode_sequences, encode_spans
from teachonce.store.format.value_laws import (
    LOG_SLACK,
    MASS_SLACK,
    Violation,
    find_violation,
    mass_violation,
    repeated_id,
    row_violation,
)
from teachonce.support.arrays import Array, Floats, begins, ranges, starts

FP32 = "the teacher's output is not usable (try --precision fp32)"
EXACT = "dump with --codec exact"
# Arrays that `put_logits` receives for each tier, in addition to the arrays of every tier.
LOGITS = {"topk": ("ids", "logprobs", "rest"), "sample": ("draws",), "head": ("values",)}


class PartWriter:
    """Encodes a part; `StoreWriter.part` makes it and `StoreWriter.publish` stores it.

    Rows are flat token numbers in the part. Put each row once for each feature. where: name of the
    part in errors. All methods raise StoreError for values of another shape, NaN or infinity, and
    numbers that the codec cannot represent.
    """

    def __init__(
        self,
        features: Features,
        calibration: Calibration,
        token_counts: ArrayLike,
        number: int = 0,
        where: str = "part",
    ) -> None:
        counts = np.asarray(token_counts, np.int64)
        if counts.ndim != 1 or not len(counts):
            raise StoreError(f"{where}: a part needs at least one sequence")
        if counts.min() < 1 or counts.max() > features.max_length:
            bad = int(np.flatnonzero((counts < 1) | (counts > features.max_length))[0])
            raise StoreError(
                f"{where}, sequence {bad}: {counts[bad]} tokens, expected 1..{features.max_length}"
            )
        self._features, self._calibration = features, calibration
        self.number, self._where = number, where
        self.token_start, self.square_start = starts(counts), starts(counts**2)
        self._tokens = int(self.token_start[-1])
        self._arrays: dict[str, Array] = {}
        self._filled: dict[str, Array] = {}
        self._draws = defaultdict[int, list[tuple[Array, Array, Array, Array]]](list)
        self._texts: list[str] | None = None
        self._taken = False
        self._allocate()

    def _allocate(self) -> None:
        sequences, zeros = len(self.token_start) - 1, (0,) * self._features.views
        counts = Counts(sequences, self._tokens, int(self.square_start[-1]), 0, zeros, zeros)
        for path, spec in part_arrays(self._features, counts).items():
            group = path.rpartition("/")[0]
            view, _, kind = group.partition("/")
            # Only these are filled by rows: `set_sequences` and `set_masks` make whole arrays.
            if view.startswith("view") and kind != "mask":
                self._arrays[path] = np.zeros(spec.shape, spec.dtype)
                of_sequences = kind == "classes" or kind.startswith("attention/")
                self._filled[group] = np.zeros(sequences if of_sequences else self._tokens, bool)
            elif group == EMBEDDING:
                self._arrays[path] = np.zeros(spec.shape, spec.dtype)
                self._filled[group] = np.zeros(sequences, bool)

    def _claim(self, name: str, rows: ArrayLike) -> Array:
        """Mark rows (tokens, or sequences for attention, classes and vectors) as filled; return
        them as an array."""
        if name not in self._filled:
            raise StoreError(
                f"{self._where}: this store has no {name}; it has {', '.join(sorted(self._filled))}"
            )
        filled, numbers = self._filled[name], np.asarray(rows, np.int64)
        if numbers.ndim != 1 or (
            len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(filled)
        ):
            raise StoreError(f"{self._where}: rows of {name} must lie in 0..{len(filled) - 1}")
        # NumPy assigns to a row twice without an error.
        if filled[numbers].any() or len(np.unique(numbers)) < len(numbers):
            raise StoreError(f"{self._where}: internal error: rows of {name} were written twice")
        filled[numbers] = True
        return numbers

    def _check(self, name: str, rows: Array, bad: Array, problem: str, remedy: str = FP32) -> None:
        if bad.any():
            row = int(rows[np.flatnonzero(bad.reshape(len(rows), -1).any(axis=1))[0]])
            sequence = int(np.searchsorted(self.token_start, row, "right")) - 1
            raise StoreError(
                f"{self._where}, sequence {sequence}, token {row - self.token_start[sequence]}: "
                f"{name} {problem}; {remedy}"
            )

    def _check_violation(self, name: str, rows: Array, violation: Violation | None) -> None:
        """Raise StoreError if the row `violation.row` of `rows` breaks a law of values (FORMAT.md,
        section 6)."""
        if violation is not None:
            self._check(name, rows[[violation.row]], np.ones(1, bool), violation.problem)

    def _check_logs(self, name: str, rows: Array, logs: Array) -> None:
        """Raise StoreError for values that are not log-probabilities."""
        bad = np.isnan(logs) | (logs > LOG_SLACK)
        self._check(name, rows, bad, "is not a log-probability (<= 0)")

    def _check_values(self, name: str, rows: Array, values: Array, limit: float) -> None:
        """Raise StoreError for values that break a law (FORMAT.md, section 6), or that the codec
        cannot represent."""
        self._check_violation(name, rows, row_violation(values))
        far = np.abs(values) >= limit
        self._check(
            name,
            rows,
            far,
            f"is over {limit:.3g}, the largest number that the codec can store",
            EXACT,
        )

    def _shaped(self, name: str, values: ArrayLike, shape: tuple[int, ...]) -> Floats:
        array = np.asarray(values, np.float32)
        if array.shape != shape:
            raise StoreError(
                f"{self._where}: {name} has shape {list(array.shape)}, expected {list(shape)}"
            )
        return array

    def set_sequences(self, sequences: Sequences) -> dict[str, Array]:
        """Set texts and tokens; returns the stored arrays by path in the part."""
        self._texts = list(sequences.texts)
        arrays = encode_sequences(sequences, self.token_start, self._features, self._where)
        self._arrays |= arrays
        return arrays

    def set_masks(self, view: int, spans: Sequence[ArrayLike]) -> None:
        """Set the masked words of a view > 0: for each sequence int32 [M, 3], with one row for each
        word.

        A row is begin and end, in characters of the sequence's text, and the action 0..2
        (FORMAT.md, section 6): mask token, random token, or the token itself.
        """
        if self._texts is None:
            raise StoreError(f"{self._where}: internal error: call set_sequences before set_masks")
        if not 0 < view < self._features.views:
            last = self._features.views - 1
            expected = f"expected a view in 1..{last}" if last else "the store has only view 0"
            raise StoreError(f"{self._where}: view {view} cannot have masks; {expected}")
        where = f"{self._where}, view {view}"
        self._arrays |= encode_spans(spans, self._texts, where, span_kind(view))

    def put_hidden(self, view: int, name: str, rows: ArrayLike, states: ArrayLike) -> None:
        """Put raw states float32 [n, D] of n rows."""
        path = f"view{view}/hidden/{name}"
        numbers = self._claim(path, rows)
        values = self._shaped(path, states, (len(numbers), self._features.width))
        # Before encoding: rounded to int8, NaN becomes an ordinary number.
        self._check_violation(path, numbers, row_violation(values))
        hidden = self._features.level.hidden
        # An overflow becomes infinity, which is over the limit and refused below with its token.
        with np.errstate(over="ignore"):
            values = hidden.normalise(values, *self._calibration[name])
        limit = hidden.codec.limit
        far = np.abs(values) >= limit
        self._check(
            path, numbers, far, f"is over {limit:.3g} standard deviations away from the mean", EXACT
        )
        for key, array in hidden.codec.encode(values).items():
            # A scale is rounded up, so it may decode to states whose squares overflow.
            violation = find_violation(self._features, self._calibration, f"{path}/{key}", array)
            self._check_violation(f"{path}/{key}", numbers, violation)
            self._arrays[f"{path}/{key}"][numbers] = array

    def put_logits(self, view: int, rows: ArrayLike, logits: Mapping[str, ArrayLike]) -> None:
        """Put the logits of n rows: the arrays of the store's tier by name, and log_partition [n],
        the logsumexp of all logits.

        `topk`: ids and logprobs [n, K], best first; rest [n], the log of the remaining mass.
        `sample`: draws [n, S], ids from the teacher's distribution, with replacement. `head`:
        values [n, D], the input of the LM head's last linear layer. With `observed`: observed [n],
        for each row t the log-probability of the token t + 1 of its sequence; for the last row of a
        sequence -inf is stored, whatever is given.
        """
        path, spec = f"view{view}/logits", self._features.logits
        numbers = self._claim(path, rows)
        assert spec is not None  # `_claim` refuses logits that the store does not have
        expected = [*LOGITS[spec.tier], "log_partition", *(["observed"] if spec.observed else [])]
        if sorted(logits) != sorted(expected):
            raise StoreError(
                f"{self._where}: {path} has {', '.join(logits)}, expected {', '.join(expected)}"
            )
        partition = self._shaped(f"{path}/log_partition", logits["log_partition"], numbers.shape)
        self._check_violation(f"{path}/log_partition", numbers, row_violation(partition))
        self._arrays[f"{path}/log_partition"][numbers] = partition
        if spec.tier == "topk":
            self._put_topk(path, numbers, spec, logits)
        elif spec.tier == "sample":
            # FORMAT.md requires ascending ids, and equal draws that are sorted are counted as runs.
            ids = np.sort(self._ids(path, numbers, logits["draws"], spec.size), axis=1)
            first = np.ones(ids.shape, bool)
            first[:, 1:] = ids[:, 1:] != ids[:, :-1]
            edges = np.flatnonzero(first)
            repeats = np.diff(np.append(edges, ids.size)).astype(count_dtype(spec.size))
            self._draws[view].append((numbers, first.sum(axis=1), ids[first], repeats))
        else:
            codec, shape = self._features.level.head, (len(numbers), spec.size)
            values = self._shaped(f"{path}/values", logits["values"], shape)
            self._check_values(f"{path}/values", numbers, values, codec.limit)
            for key, array in codec.encode(values).items():
                self._arrays[f"{path}/{key}"][numbers] = array
        if spec.observed:
            observed = self._shaped(f"{path}/observed", logits["observed"], numbers.shape)
            last = np.isin(numbers, self.token_start[1:] - 1)
            logs = np.where(last, -np.inf, observed)
            self._check_logs(f"{path}/observed", numbers, logs)
            self._arrays[f"{path}/observed"][numbers] = self._features.level.rest.to_codes(logs)

    def _ids(self, path: str, numbers: Array, ids: ArrayLike, size: int) -> Array:
        array = np.asarray(ids)
        if array.shape != (len(numbers), size) or array.dtype.kind not in "iu":
            raise StoreError(
                f"{self._where}: {path}/ids is {array.dtype}{list(array.shape)}, "
                f"expected whole numbers [{len(numbers)}, {size}]"
            )
        # Checked before the conversion to uint32, which would turn a negative id into a large one.
        bad = (array < 0) | (array >= self._features.vocabulary)
        self._check(f"{path}/ids", numbers, bad, "is outside the vocabulary")
        return array.astype(np.uint32)

    def _put_topk(
        self, path: str, numbers: Array, spec: LogitsSpec, logits: Mapping[str, ArrayLike]
    ) -> None:
        size, level = spec.size, self._features.level
        best = self._ids(path, numbers, logits["ids"], size)
        # Places depend on all ids of the part, so the array `places` holds ids until `_rank` is
        # called.
        self._arrays[f"{path}/{'places' if spec.ranked else 'ids'}"][numbers] = best
        logprobs = self._shaped(f"{path}/logprobs", logits["logprobs"], best.shape)
        rest = self._shaped(f"{path}/rest", logits["rest"], numbers.shape)
        for key, logs, codec in (
            ("logprobs", logprobs, level.logprobs),
            ("rest", rest, level.rest),
        ):
            self._check_logs(f"{path}/{key}", numbers, logs)
            self._arrays[f"{path}/{key}"][numbers] = codec.to_codes(logs)
        # The given values are checked, not the codes, so that the sum has no rounding error.
        self._check_violation(f"{path}/ids", numbers, repeated_id(best, logprobs))
        self._check_violation(f"{path}/logprobs", numbers, mass_violation(logprobs, rest))

    def put_attention(self, view: int, name: str, sequence: int, probabilities: ArrayLike) -> None:
        """Put the attention map `name` of the part's sequence with the index `sequence`, float32
        [L, L]."""
        path = f"view{view}/attention/{name}"
        self._claim(path, [sequence])
        length = int(self.token_start[sequence + 1] - self.token_start[sequence])
        values = self._shaped(path, probabilities, (length, length))
        rows = np.arange(self.token_start[sequence], self.token_start[sequence + 1])
        # The negation refuses NaN as well, for which every comparison is false.
        bad = ~((values >= 0) & (values <= 1 + LOG_SLACK))
        self._check(path, rows, bad, "is not a probability")
        off = np.abs(values.sum(axis=1) - 1) > MASS_SLACK
        self._check(path, rows, off, "has probabilities of a row that do not sum to 1")
        begin, end = self.square_start[sequence], self.square_start[sequence + 1]
        codes = self._features.level.attention.to_codes(values)
        self._arrays[f"{path}/values"][begin:end] = codes.reshape(-1)

    def put_task(self, view: int, rows: ArrayLike, logits: ArrayLike) -> None:
        """Put raw logits float32 [n, C] of n sequences (classification) or n tokens (tagging)."""
        task = self._features.task
        if task is None:
            raise StoreError(
                f"{self._where}: this store has no task, so it cannot store task logits"
            )
        path = f"view{view}/{task.outputs}"
        numbers = self._claim(path, rows)
        values = self._shaped(path, logits, (len(numbers), len(task.labels)))
        tokens = numbers if task.kind == "tagging" else self.token_start[numbers]
        self._check_violation(path, tokens, row_violation(values))
        self._arrays[f"{path}/values"][numbers] = values

    def put_embedding(self, sequences: ArrayLike, vectors: ArrayLike) -> None:
        """Put the teacher's vectors, float32 [n, W], of n sequences of the part."""
        spec, codec = self._features.embedding, self._features.level.embedding
        numbers = self._claim(EMBEDDING, sequences)
        values = self._shaped(EMBEDDING, vectors, (len(numbers), spec.width if spec else 0))
        self._check_values(EMBEDDING, self.token_start[numbers], values, codec.limit)
        for key, array in codec.encode(values).items():
            self._arrays[f"{EMBEDDING}/{key}"][numbers] = array

    def _gather_draws(self, view: int) -> int:
        """Sort the sampled ids by token; return their number."""
        puts = self._draws[view]
        rows, lengths, ids, counts = (np.concatenate(arrays) for arrays in zip(*puts, strict=True))
        # Each row occurs once (`_claim`), so no stable sort is needed.
        order = np.argsort(rows)
        sizes = lengths[order]
        start, indices = starts(sizes), ranges(begins(lengths)[order], sizes)
        path = f"view{view}/logits"
        self._arrays[f"{path}/start"] = start
        self._arrays[f"{path}/ids"], self._arrays[f"{path}/counts"] = ids[indices], counts[indices]
        return int(start[-1])

    def _rank(self, view: int) -> int:
        """Replace the ids of ranked logits by their places; return the number of distinct ids."""
        path = f"view{view}/logits"
        places, distinct = rank_ids(self._arrays[f"{path}/places"])
        self._arrays[f"{path}/places"], self._arrays[f"{path}/distinct"] = places, distinct
        return len(distinct)

    def take(self) -> tuple[Counts, dict[str, Array]]:
        """Return counts and arrays of the part; call it once. Raises StoreError if rows are
        missing."""
        if self._taken:
            raise StoreError(f"{self._where}: internal error: published twice")
        features = self._features
        missing = sorted(name for name, filled in self._filled.items() if not filled.all())
        if self._texts is None:
            missing.append("sequences")
        missing += [
            f"masks of view {view}"
            for view in range(1, features.views)
            if f"{span_kind(view).group}/start" not in self._arrays
        ]
        if missing:
            raise StoreError(f"{self._where}: internal error: not written: {', '.join(missing)}")
        self._taken = True
        views, spec = range(features.views), features.logits
        ragged: Callable[[int], int] | None = None
        if spec and (spec.ranked or spec.tier == "sample"):
            ragged = self._rank if spec.ranked else self._gather_draws
        counts = Counts(
            sequences=len(self.token_start) - 1,
            tokens=self._tokens,
            squares=int(self.square_start[-1]),
            text_bytes=len(self._arrays["text/utf8"]),
            spans=tuple(len(self._arrays.get(f"{span_kind(v).group}/begin", ())) for v in views),
            draws=tuple(ragged(v) if ragged else 0 for v in views),
        )
        arrays, self._arrays = self._arrays, {}
        # In the order of the format: HDF5 lays arrays out as they are written, and equal parts must
        # have equal bytes.
        return counts, {name: arrays[name] for name in part_arrays(features, counts)}
