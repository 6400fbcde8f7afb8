"""Check the laws of values: the limits on numbers that a teacher can have computed (FORMAT.md,
section 6).

`find_violation` checks one array, in less time than it takes to read it; `joint_violations`
compares several. A function that returns a Violation returns the first one, or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.format.codecs.levels import bound
from teachonce.store.format.features import CONTEXT, Calibration, Features
from teachonce.support.arrays import Array, Floats, starts

LOG_SLACK = 1e-2  # a log-probability may exceed 0 by rounding
MASS_SLACK = 0.05  # of a sum of probabilities, for bfloat16 teachers and captures
# The best of V probabilities is at least their mean, 1/V. In nats, its log may be lower by this,
# because vocabularies are padded.
FAR_BELOW = 10.0
HALF_INFINITE = 0x7C00  # as unsigned bits, every float16 below this is finite and at least 0
MINUS_ZERO = 0x8000
LARGEST = float(np.finfo(np.float32).max)


class Violation(NamedTuple):
    """Describes the first row (first axis) of an array that breaks a law.

    problem: what is wrong, a phrase that follows the array's name.
    leaf: the last segment of the array's path, if several arrays were compared.
    """

    row: int
    problem: str
    leaf: str = ""

    def leaf_of(self, name: str) -> str:
        """Return the path of the array that breaks the law, given the path `name` of an array
        compared with it."""
        return f"{name.rpartition('/')[0]}/{self.leaf}" if self.leaf else name


def find_violation(
    features: Features, calibration: Calibration, path: str, values: Array
) -> Violation | None:
    """Return the first violation in an array of a part, or in some of its rows; None if there is
    none. `path` is the array's path in the part."""
    *_, group, leaf = f"//{path}".split("/")
    if not values.size:
        return None
    if leaf in ("id", "ids", "distinct"):
        within = f"is outside the vocabulary of {features.vocabulary}"
        return out_of_range(values, 0, features.vocabulary - 1, within)
    if leaf in ("begin", "end") and group == "token":
        # The upper limits are the lengths of the texts; `part_laws` reads the texts and compares.
        return out_of_range(values, 0, None, "is below 0")
    # The length of each sequence is not known here; `part_laws` compares `context` with it.
    if path == CONTEXT:
        last = features.max_length - 1
        return out_of_range(values, 0, last, f"is not a number of tokens from 0 to {last}")
    if leaf in ("label", "tag") and features.task:
        last = len(features.task.labels) - 1
        return out_of_range(values, -1, last, f"holds a number that is not a label (-1..{last})")
    if leaf == "counts":
        return out_of_range(values, 1, None, "is 0")
    # Integer codes need no check: given a lawful scale, each decodes to a lawful value.
    if values.dtype.kind != "f":
        return None
    if leaf == "scale" and values.dtype == np.float16:
        return _scale_violation(features, calibration, path, values)
    if leaf in ("logprobs", "rest", "observed"):
        return out_of_range(values, None, LOG_SLACK, "is not a log-probability (<= 0)")
    if path.split("/")[1:2] == ["attention"]:
        return out_of_range(values, 0, 1 + LOG_SLACK, "is not a probability")
    return row_violation(values)


def _first_row(bad: Array | None, problem: str) -> Violation | None:
    if bad is None or not bad.any():
        return None
    return Violation(int(bad.reshape(len(bad), -1).any(axis=1).argmax()), problem)


def out_of_range(
    values: Array, low: float | None, high: float | None, problem: str
) -> Violation | None:
    """Return the first row with a value below `low`, above `high`, or NaN."""
    # Minimum and maximum take a tenth of the time of comparing each value.
    # NaN passes neither comparison, as minimum and maximum of an array with NaN are NaN.
    fits = (low is None or values.min() >= low) and (high is None or values.max() <= high)
    if fits:
        return None
    inside = np.ones(values.shape, bool)
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    return _first_row(~inside, problem)


def row_violation(values: Array) -> Violation | None:
    """Return the first row that has NaN or infinity, or whose sum of squares exceeds LARGEST."""
    if _squares_are_finite(values):
        return None
    if violation := _first_row(~np.isfinite(values), "is NaN or infinite"):
        return violation
    # The sum of squares of all rows may overflow although no row's sum does.
    rows = values.reshape(len(values), -1)
    # In float64 the sum of squares of float32 numbers cannot overflow before it is compared.
    squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return _first_row(squares > LARGEST, "is too large: its squares sum to infinity in float32")


def all_finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite."""
    # The first test makes no array of flags, but large finite values may fail it.
    return _squares_are_finite(values) or bool(np.isfinite(values).all())


def _squares_are_finite(values: Array) -> bool:
    """Return whether all values and their sum of squares are finite."""
    # NumPy's isfinite of float16 takes over ten times as long as a comparison of the bits.
    if values.dtype == np.float16:  # 2^20 squares of float16 are far below LARGEST
        bits = np.bitwise_and(values.view(np.uint16), np.uint16(MINUS_ZERO - 1))
        return not bits.size or int(bits.max()) < HALF_INFINITE
    flat = values.reshape(-1)
    with np.errstate(all="ignore"):  # a finite sum of squares has only finite terms
        return bool(np.isfinite(flat @ flat))


def calibration_problem(mean: Floats, deviation: Floats) -> str:
    """Describe what is wrong with the mean and standard deviation [D] of hidden states; "" if
    nothing is."""
    if not (np.isfinite(mean) & np.isfinite(deviation) & (deviation > 0)).all():
        return "is not finite with deviations over 0"
    violation = row_violation(np.stack([mean, deviation]))
    return violation.problem if violation else ""


def _scale_violation(
    features: Features, calibration: Calibration, path: str, values: Array
) -> Violation | None:
    """Check that scales are finite, at least 0, and decode to states whose squares are finite."""
    largest = int(values.view(np.uint16).max())
    if largest >= HALF_INFINITE and (
        fault := _first_row(~(np.isfinite(values) & (values >= 0)), "is NaN, infinite or below 0")
    ):
        return fault
    # -0.0 is allowed, but as an unsigned number its bits exceed those of any scale.
    highest = np.uint16(largest).view(np.float16) if largest < HALF_INFINITE else values.max()
    names = path.split("/")
    # `verify` leaves out a damaged calibration, which it has reported already.
    if names[1] != "hidden" or names[2] not in calibration:
        return None
    mean, deviation = calibration[names[2]]
    with np.errstate(all="ignore"):
        # 128 and not 127: a forged int8 code may be -128.
        factor, far = 128 * float(deviation.max()), float(np.abs(mean).max())
        # If each of D numbers is below sqrt(LARGEST / D), the sum of their squares is below
        # LARGEST.
        limit = float(np.sqrt(LARGEST / features.width))
        if float(highest) * factor + far < limit:
            return None
        return _first_row(
            values.astype(np.float64) * factor + far >= limit,
            "decodes to states whose squares sum to infinity in float32",
        )


def topk_violation(
    features: Features, ids: Array, logprobs: Array, rest: Array
) -> Violation | None:
    """Check the laws of tier `topk`: ids and log-probabilities [N, K], and `rest` [N], stored."""
    level = features.level
    with np.errstate(all="ignore"):
        values = level.logprobs.from_codes(logprobs)
        log_rest = level.rest.from_codes(rest)
        if fault := out_of_range(values, None, LOG_SLACK, "is not a log-probability (<= 0)"):
            return fault
        if fault := out_of_range(
            log_rest, None, LOG_SLACK, "has a rest that is not a log-probability (<= 0)"
        ):
            return fault
        if fault := _first_row(values[:, 1:] > values[:, :-1], "is not ordered, best first"):
            return fault
        if fault := repeated_id(ids, values):
            return fault
        # The best of V probabilities is at least their mean, 1/V.
        least = -np.log(features.vocabulary) - FAR_BELOW
        if fault := _first_row(values[:, 0] < least, "has a best id that is far too improbable"):
            return fault
        errors = bound(level, "logprobs", values), bound(level, "rest", log_rest)
        return mass_violation(values, log_rest, errors)


def mass_violation(
    logprobs: Floats, rest: Floats, errors: tuple[ArrayLike, ArrayLike] = (0, 0)
) -> Violation | None:
    """Check that probabilities [N, K] and `rest` [N], both as logs, sum to 1 within MASS_SLACK.

    `errors` are the largest encoding errors of both. The sum may deviate further by these errors.
    """

    def total(sign: int) -> Array:
        # The error of -inf may be infinite itself (`Root.bound`), and -inf + inf is NaN.
        best, left = (
            np.where(np.isneginf(values), values, values + sign * np.asarray(error, np.float32))
            for values, error in zip((logprobs, rest), errors, strict=True)
        )
        mass: Array = np.exp(best, dtype=np.float64).sum(axis=1) + np.exp(left, dtype=np.float64)
        return mass

    least, subject = total(-1), "and rest have probabilities that sum to"
    if violation := _first_row(least > 1 + MASS_SLACK, f"{subject} more than 1"):
        return violation
    if (least >= 1 - MASS_SLACK).all():  # saves the time of the second total
        return None
    return _first_row(total(1) < 1 - MASS_SLACK, f"{subject} less than 1")


def repeated_id(ids: Array, logprobs: Floats) -> Violation | None:
    """Return the first row [K] that has an id twice. Entries with log-probability -inf are
    empty."""
    size = ids.shape[1]
    # Empty places repeat the best id (FORMAT.md, section 6), so each gets a number that no id has.
    behind = np.arange(size, dtype=np.int64) + 2**32
    ordered = np.sort(np.where(np.isneginf(logprobs), behind, ids), axis=1)
    violation = _first_row(ordered[:, 1:] == ordered[:, :-1], "has an id twice")
    return violation and violation._replace(leaf="ids")


def draws_violation(
    features: Features, start: Array, ids: Array, counts: Array
) -> Violation | None:
    """Check the laws of tier `sample`: ids and counts [M] of N tokens; `start` is [N + 1]."""
    size = features.logits.size if features.logits else 0
    # Not np.add.reduceat: for a token without draws it returns a count of the next one.
    if fault := _first_row(np.diff(starts(counts)[start]) != size, f"does not sum to {size} draws"):
        return fault._replace(leaf="counts")
    # In int64, because a difference of unsigned ids would wrap around.
    follows = np.diff(ids.astype(np.int64), prepend=-1) > 0
    # The first id of a token may be below the last one of the token before.
    follows[start[:-1][start[:-1] < len(ids)]] = True
    fault = _first_row(~follows, "")
    if fault is None:
        return None
    token = int(np.searchsorted(start, fault.row, "right")) - 1
    return Violation(token, "has ids that do not ascend", "ids")


def logprob_bounds(following: Array, ids: Array, logprobs: Floats) -> tuple[Array, Floats]:
    """Return what the stored top-k values say about the log-probability of one token in each row.

    following: [N], the token of each row. ids, logprobs: [N, K], best first. Returns bool [N],
        whether the token is among the ids, and float [N]: its log-probability if it is, else an
        upper bound.
    """
    matches = (ids == following[:, None]) & ~np.isneginf(logprobs)
    inside, least = matches.any(axis=1), logprobs[:, -1]
    matched: Floats = logprobs[np.arange(len(ids)), matches.argmax(axis=1)]
    # A row with empty places does not bound the tokens that it leaves out.
    return inside, np.where(inside, matched, np.where(np.isneginf(least), 0, least))


def observed_violation(
    features: Features, tokens: Array, lengths: Array, observed: Array, best: tuple[Array, ...]
) -> Violation | None:
    """Check the stored `observed` [N] of sequences of `lengths` against their `tokens` [N].

    best: the stored ids and log-probabilities [N, K] of tier `topk`; empty for other tiers.
    """
    level, last = features.level, np.cumsum(lengths) - 1
    with np.errstate(all="ignore"):
        values: Floats = level.rest.from_codes(observed)
        if violation := out_of_range(values, None, LOG_SLACK, "is not a log-probability (<= 0)"):
            return violation
        ends = np.zeros(len(values), bool)
        ends[last] = True
        if violation := _first_row(ends & ~np.isneginf(values), "is not -inf in a last row"):
            return violation
        if not best:
            return None
        logprobs: Floats = level.logprobs.from_codes(best[1])
        # The last row of a sequence meets the first token of the next one here; `ends` leaves it
        # out below.
        inside, expected = logprob_bounds(np.roll(tokens, -1), best[0], logprobs)
        slack = LOG_SLACK + bound(level, "rest", values) + bound(level, "logprobs", expected)
        floor = max(level.rest.lowest, level.logprobs.lowest)  # codecs hold no lower values
        above = np.maximum(values, floor) - np.maximum(expected, floor)
        off = (above > slack) | (inside & (above < -slack))
    return _first_row(off & ~ends, "is not the log-probability of the next token")


def attention_violation(features: Features, codes: Array, lengths: Array) -> Violation | None:
    """Check the attention maps of sequences: return the first token (query) whose probabilities
    break a law.

    codes: encoded, L^2 of each sequence, one after the other. lengths: L of each sequence.
    """
    values: Floats = features.level.attention.from_codes(codes)
    rows = starts(np.repeat(lengths, lengths))[:-1]
    with np.errstate(all="ignore"):
        # Negated, so that NaN, which fails both comparisons, is bad, too.
        bad = ~((values >= 0) & (values <= 1 + LOG_SLACK))
        if violation := _first_row(np.logical_or.reduceat(bad, rows), "is not a probability"):
            return violation
        sums = np.add.reduceat(values, rows, dtype=np.float64)
        off = np.abs(sums - 1) - MASS_SLACK
        # Sound maps stay within the slack, so the encoding error is computed only if a map does
        # not.
        if (off > 0).any():
            off -= np.add.reduceat(bound(features.level, "attention", values), rows)
    return _first_row(off > 0, "has probabilities that do not sum to 1")


def joint_violations(
    features: Features,
    view: str,
    stored: Mapping[str, Array],
    lengths: Array,
    draws: tuple[Array, Array, Array] | None,
) -> Iterator[tuple[str, Violation]]:
    """Yield the violations of laws between arrays, each with the path of an array.

    stored: rows of the arrays of a `view` by path, for sequences of `lengths`.
    draws: start [N + 1], ids [M] and counts [M] of tier `sample`.
    """
    keys = [f"{view}/logits/{key}" for key in ("ids", "logprobs", "rest")]
    if all(key in stored for key in keys) and (
        violation := topk_violation(features, *(stored[key] for key in keys))
    ):
        yield keys[1], violation
    if draws and (violation := draws_violation(features, *draws)):
        yield keys[0], violation
    if (path := f"{view}/logits/observed") in stored:
        best = tuple(stored[key] for key in keys[:2]) if all(k in stored for k in keys) else ()
        if violation := observed_violation(
            features, stored["token/id"], lengths, stored[path], best
        ):
            yield path, violation
    for name in features.attention:
        path = f"{view}/attention/{name}/values"
        if path in stored and (violation := attention_violation(features, stored[path], lengths)):
            yield path, violation
