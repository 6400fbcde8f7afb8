"""What every format of captures gives: samples, with the rows that the teacher gave of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from teachonce.store.format.value_laws import MASS_SLACK, repeated_id
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError


@dataclass(frozen=True, eq=False)
class Rows:
    """What the teacher gave of a sample of T tokens.

    `hidden` are states [T,D] by name. `kept` are the best ids and their log-probabilities, both
    [T,K], of the token after each; -inf where a place is empty. `vector` is one of the whole text.
    """

    hidden: Mapping[str, Floats] = field(default_factory=dict)
    kept: tuple[Array, Floats] | None = None
    vector: Floats | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """One text of a capture: its token ids int64 [T], or the text itself where it has no ids.

    `where` names file and row for an error. `rows` reads and decodes what the teacher gave.
    `continues` is true where the tokens may begin within a document, or within a word.
    """

    where: str
    rows: Callable[[], Rows]
    ids: Array | None = None
    text: str | None = None
    continues: bool = False


@dataclass(frozen=True)
class Held:
    """What a capture holds: the names and the width of its states, how many ids of a token it
    keeps, the width of its vectors of texts; `vocabulary` where it tells that itself."""

    hidden: tuple[str, ...] = ()
    width: int | None = None
    kept: int | None = None
    vector: int | None = None
    vocabulary: int | None = None


class Capture(Protocol):
    """A capture that is open for reading, more than once."""

    @property
    def held(self) -> Held: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What was needed to read it, for the identity of the store."""

    def files(self) -> list[Path]:
        """Return the files that it is made of, in the order in which they are read."""

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in an order that depends on the files alone. Raises UserError."""


def same_length(ids: Array, rows: int, what: str, where: str) -> None:
    """Raise UserError unless there is one row for each token."""
    if len(ids) != rows:
        raise UserError(
            f"{where}: {len(ids):,} token ids, and {what} of {rows:,} tokens; the file is damaged,"
            " or of another format"
        )


DAMAGED = (
    "the file is damaged, or of another format, or the tokenizer is not that of the captured"
    " teacher"
)


def best_first(
    ids: Array, logprobs: Floats, size: int, where: str, tally: Counter[str], vocabulary: int
) -> tuple[Array, Floats, Floats]:
    """Return ids and log-probabilities [T,size], best first, and the log of what is left over [T].

    A place that the capture leaves empty (-inf) gets the best id of its row and -inf: it adds
    nothing to the distribution, and takes nothing of what is left over. `tally` counts the rows
    with empty places as `partial`, and as `over` those that sum to more than 1, of which nothing is
    left. Raises UserError for what are no log-probabilities of one token.
    """
    if np.isnan(logprobs).any():
        row = int(np.isnan(logprobs).any(axis=1).argmax())
        raise UserError(
            f"{where}, token {row}: a log-probability is NaN; capture that sample again, or take it"
            " out"
        )
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :size]
    values = np.take_along_axis(logprobs, order, axis=1)
    best = np.take_along_axis(ids, order, axis=1)
    with np.errstate(over="ignore"):
        total = np.exp(values.astype(np.float64)).sum(axis=1)
    bad = (total > 1 + MASS_SLACK) | (values[:, 0] > MASS_SLACK) | np.isneginf(values[:, 0])
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f"{where}, token {row}: the probabilities of the kept ids sum to {total[row]:.3g}: they"
            " are no log-probabilities of one token (raw logits, of which nobody knows the sum over"
            " the vocabulary, or other settings of compression)"
        )
    if found := repeated_id(best, values):
        raise UserError(f"{where}, token {found.row}: an id is kept twice: {DAMAGED}")
    outside = ((ids < 0) | (ids >= vocabulary)) & ~np.isneginf(logprobs)
    if outside.any():
        row, place = np.argwhere(outside)[0].tolist()
        raise UserError(
            f"{where}, token {row}: kept id {ids[row, place]:,} is beyond the vocabulary of"
            f" {vocabulary:,}: {DAMAGED}"
        )
    if (missing := size - values.shape[1]) > 0:
        values = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
        best = np.pad(best, ((0, 0), (0, missing)))
    empty = np.isneginf(values)
    best = np.where(empty, best[:, :1], best)
    tally["partial"] += int(empty.any(axis=1).sum())
    tally["over"] += int((total >= 1).sum())
    with np.errstate(divide="ignore"):
        rest = np.log1p(-np.minimum(total, 1))
    return best, np.minimum(values, 0).astype(np.float32), rest.astype(np.float32)
