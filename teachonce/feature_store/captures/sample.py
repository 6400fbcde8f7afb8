"""The interface of captures: samples, and the teacher's output for each sample."""

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
    """Holds the teacher's output for a sample of T tokens.

    hidden: states [T,D] by name.
    topk: the most likely ids of the next token and their log-probabilities, both [T,K]; a
        log-probability of -inf marks an empty entry.
    observed: [T], the log-probability of the actual next token.
    vector: the vector [D] of the whole text.
    """

    hidden: Mapping[str, Floats] = field(default_factory=dict)
    topk: tuple[Array, Floats] | None = None
    observed: Floats | None = None
    vector: Floats | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """Holds one text of a capture: its token ids int64 [T], or the text itself if there are no ids.

    where: file and row, for error messages. rows: reads and decodes the teacher's output.
    continues: whether the tokens may start inside a document or inside a word.
    """

    where: str
    rows: Callable[[], Rows]
    ids: Array | None = None
    text: str | None = None
    continues: bool = False


@dataclass(frozen=True)
class CaptureContents:
    """Holds names and sizes of the features in a capture.

    hidden, width: names and hidden size of the states.
    topk: number of ids stored for a token.
    observed: whether the log-probability of each next token is captured as well.
    vector: size of the text vectors.
    vocabulary: its size, if the capture has it.
    """

    hidden: tuple[str, ...] = ()
    width: int | None = None
    topk: int | None = None
    observed: bool = False
    vector: int | None = None
    vocabulary: int | None = None


class Capture(Protocol):
    """Reads a capture; `samples` may be called several times."""

    @property
    def contents(self) -> CaptureContents: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings with which the capture is read; they are part of the store's
        identity."""

    def files(self) -> list[Path]:
        """Return the capture's files, in the order in which they are read."""

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in an order that depends only on the files. Raises UserError for a
        file or row that cannot be read."""


def same_length(ids: Array, rows: int, name: str, where: str) -> None:
    """Raise UserError unless there is one row for each token."""
    if len(ids) != rows:
        raise UserError(
            f"{where}: {len(ids):,} token ids, and {name} of {rows:,} tokens; the file is damaged"
            " or of another format"
        )


DAMAGED = "the file is damaged or of another format, or --tokenizer is not the captured teacher's"


def best_first(
    ids: Array, logprobs: Floats, size: int, where: str, tally: Counter[str], vocabulary: int
) -> tuple[Array, Floats, Floats]:
    """Sort ids and log-probabilities, best first: [T,size] each. Also return the log of the rest
    [T].

    The rest is the probability outside the top-k ids. An empty entry (-inf) gets the best id of its
    row and -inf, which changes neither the distribution nor the rest. `tally` counts rows with
    empty entries as `partial`, and rows that sum to 1 or more, without a rest, as `over`. Raises
    UserError for rows that are not the log-probabilities of one token.
    """
    # Before sorting, which moves NaN to the end of a row, where `size` may cut it off.
    if np.isnan(logprobs).any():
        row = int(np.isnan(logprobs).any(axis=1).argmax())
        raise UserError(
            f"{where}, token {row}: a log-probability is NaN; capture this sample again, or remove"
            " it"
        )
    # Stable, so that ties keep the order of the capture: a repeated import gives equal bytes.
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :size]
    values = np.take_along_axis(logprobs, order, axis=1)
    best = np.take_along_axis(ids, order, axis=1)
    # The exponentials of raw logits may be infinite; such rows are refused below.
    with np.errstate(over="ignore"):
        total = np.exp(values.astype(np.float64)).sum(axis=1)
    # bfloat16 and fitted tails (DistillKit) put sums a little above 1; raw logits are far above it.
    bad = (total > 1 + MASS_SLACK) | (values[:, 0] > MASS_SLACK) | np.isneginf(values[:, 0])
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f"{where}, token {row}: the top-k probabilities sum to {total[row]:.3g}, expected 1 at"
            " most: these are not log-probabilities of one token, but raw logits (capture"
            " log-probabilities) or values of another compression (check --compression)"
        )
    if repeated := repeated_id(best, values):
        raise UserError(f"{where}, token {repeated.row}: an id occurs twice: {DAMAGED}")
    # An empty entry may have any id, also an id outside the vocabulary.
    outside = ((ids < 0) | (ids >= vocabulary)) & ~np.isneginf(logprobs)
    if outside.any():
        row, column = np.argwhere(outside)[0].tolist()
        raise UserError(
            f"{where}, token {row}: top-k id {ids[row, column]:,} is beyond the vocabulary of"
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
