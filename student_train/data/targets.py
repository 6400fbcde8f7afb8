"""The teacher's targets: its distribution, mapped to the student's vocabulary, and the targets of a
task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from teachonce.align import VocabularyMap
from teachonce.store import Batch, Logits, LogitsSpec
from teachonce.store.format.features import OutputKind
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.support.arrays import Array, ranges
from teachonce.training.words import word_spans

# With this limit `kl` of the head tier is not exact; `kl-shared` compares all shared pieces. A
# student has 4.84 nats, with `topk:160` 4.86 (RESULTS, "Quality by tier").
HEAD_BEST = 256  # best shared pieces that become targets of the head tier; the others join the rest


@dataclass(frozen=True)
class TaskTargets:
    """Holds the targets of a task, for G texts or G tokens."""

    tokens: Tensor | None  # int64 [G]: flat student tokens; None: one target per text
    logits: Tensor | None  # float32 [G,C]: the teacher's
    gold: Tensor  # int64 [G], -1 without a label
    output_kind: OutputKind = "one label"


def fold(
    ids: Array,
    logprobs: Array,
    rest: Array,
    log_partition: Array,
    vocabulary: Array,
) -> tuple[LogitTargets, Array]:
    """Map stored teacher probabilities [G,K] to student pieces. Return the targets, and the rows
    that have a piece: bool [G]; other rows are left out of the targets.

    `vocabulary` [Vt] is the student piece of each teacher piece, or -1. Probabilities of teacher
    pieces with the same student piece are added. Pieces without a student piece are added to the
    rest. So the outcomes still sum to one. Sums are float64, the targets have the dtype of
    `log_partition`.
    """
    # A head may have more rows than its tokenizer has pieces: such ids have no piece.
    mapped = np.where(ids < len(vocabulary), vocabulary[np.minimum(ids, len(vocabulary) - 1)], -1)
    # Stable, so that equal pieces are added in the stored order: sums have the same last bits.
    order = np.argsort(mapped, axis=1, kind="stable")
    mapped = np.take_along_axis(mapped, order, axis=1)
    probability = np.exp(np.take_along_axis(logprobs, order, axis=1).astype(np.float64))
    first = np.ones(mapped.shape, bool)
    first[:, 1:] = mapped[:, 1:] != mapped[:, :-1]
    slot = np.cumsum(first, axis=1) - 1
    rows = np.arange(len(mapped))[:, None]
    mass = np.zeros(mapped.shape)
    # `mass[rows, slot] += probability` would count only one of several pieces of a slot.
    np.add.at(mass, (rows, slot), probability)
    piece = np.full(mapped.shape, -1)
    piece[np.broadcast_to(rows, slot.shape)[first], slot[first]] = mapped[first]
    unshared = np.where(piece == -1, mass, 0).sum(axis=1)
    valid = (piece >= 0) & (mass > 0)
    with np.errstate(divide="ignore"):
        folded = np.log(np.where(valid, mass, 0))
        log_rest = np.log(np.exp(rest.astype(np.float64)) + unshared)
    has_piece = np.asarray(valid.any(axis=1))
    # Invalid slots point at a valid piece of their row: gathers and scatters need no extra column.
    valid_piece = np.where(valid, piece, -1).max(axis=1, initial=-1)
    piece = np.where(valid, piece, valid_piece[:, None]).astype(np.int64)
    folded, log_rest = (array.astype(log_partition.dtype) for array in (folded, log_rest))
    columns = (piece, folded, valid, log_rest, log_partition)
    return LogitTargets(*(torch.from_numpy(value[has_piece]) for value in columns)), has_piece


def first_pieces(vocabulary: VocabularyMap) -> Array:
    """Return the first student piece [Vt] of each teacher piece's split, or -1. For a shared piece
    it is the piece itself."""
    # The split of an unknown piece is the student's unk, which must not become a target.
    has_one = (np.diff(vocabulary.split_start) > 0) & ~vocabulary.unknown
    first = np.full(len(vocabulary.match), -1)
    first[has_one] = vocabulary.split_ids[vocabulary.split_start[:-1][has_one]]
    return first


class TargetReader:
    """Turns stored logits of any tier into targets in the student's vocabulary.

    pieces: the student piece of each teacher piece, or -1: [Vt], or [2,Vt] if it depends on the
        place: row 0 inside a word, row 1 at its start. The `map_index` of methods, int64 [G], has
        the row of each token; it is None if there is one row.
    head: weight [V,D] and bias [V] of the teacher's head, for the head tier.
    spec: caps the logits of this head.
    """

    def __init__(
        self,
        pieces: Array,
        head: tuple[Array, Array] | None = None,
        spec: LogitsSpec | None = None,
    ) -> None:
        self.pieces, self.spec = np.atleast_2d(pieces), spec
        if head is not None:  # only the rows of shared pieces are ever multiplied
            self.shared = np.flatnonzero((self.pieces >= 0).any(axis=0))
            self.weight, self.bias = (torch.from_numpy(part[self.shared]) for part in head)

    def of(
        self, logits: Logits, rows: Array, map_index: Array | None = None
    ) -> tuple[LogitTargets, Array]:
        """Return the targets of the teacher's tokens `rows` [G], and the rows that have any: bool
        [G] (see `fold`)."""
        log_partition = logits.log_partition[rows]
        if logits.tier == "topk":
            stored = logits.ids[rows], logits.logprobs[rows], logits.rest[rows]
        elif logits.tier == "sample":
            stored = _drawn(logits, rows)
        else:
            stored = self._best_shared(logits.values[rows], log_partition, map_index)
        ids, logprobs, rest = stored
        if map_index is not None:
            size = self.pieces.shape[1]
            ids = np.where(ids < size, ids + size * map_index[:, None], self.pieces.size)
        return fold(ids, logprobs, rest, log_partition, self.pieces.reshape(-1))

    def shared_of(
        self, logits: Logits, rows: Array, map_index: Array | None = None
    ) -> tuple[SharedTargets, Array]:
        """Return the targets of the teacher's tokens `rows` [G] over the shared pieces, and the
        rows that have any: bool [G].

        The head tier has all shared pieces, `topk` only those among the K best. Probabilities of
        teacher pieces with the same student piece are added.
        """
        if logits.tier != "head":
            best, has_piece = self.of(logits, rows, map_index)
            return SharedTargets(best.ids, best.logprobs, best.valid), has_piece
        count = len(rows) if len(self.shared) else 0
        outputs = self._head_logits(logits.values[rows][:count])
        mapped = self.pieces[:, self.shared]
        pieces = np.unique(mapped[mapped >= 0])
        if map_index is None:
            summed, valid = _summed(outputs, mapped[0], pieces), torch.ones(1, 1, dtype=torch.bool)
        else:
            summed = torch.full((count, len(pieces)), -torch.inf)
            for number, row in enumerate(mapped):
                at_row = np.flatnonzero(map_index[:count] == number)
                summed[at_row] = _summed(outputs[at_row], row, pieces)
            valid = torch.from_numpy(
                np.stack([np.isin(pieces, row) for row in mapped])[map_index[:count]]
            )
        ids = torch.from_numpy(pieces.astype(np.int64)).expand(count, -1)
        return SharedTargets(ids, summed, valid.expand_as(summed)), np.full(len(rows), count > 0)

    def _head_logits(self, values: Array) -> Tensor:
        outputs = torch.addmm(self.bias, torch.from_numpy(values), self.weight.T)
        return self.spec.capped(outputs, torch) if self.spec else outputs

    def _best_shared(
        self, values: Array, log_partition: Array, map_index: Array | None
    ) -> tuple[Array, Array, Array]:
        logprobs = self._head_logits(values) - torch.from_numpy(log_partition)[:, None]
        if map_index is not None:
            shared = torch.from_numpy(self.pieces[:, self.shared] >= 0)
            logprobs = logprobs.masked_fill(~shared[torch.from_numpy(map_index)], -torch.inf)
        best, index = logprobs.topk(min(HEAD_BEST, len(self.shared)), dim=1)
        # The input of the head is stored in float16: the probabilities may sum to slightly above 1.
        rest = torch.log1p(-best.double().exp().sum(1).clamp(max=1 - 1e-9)).float()
        return self.shared[index.numpy()], best.numpy(), rest.numpy()


def _summed(logits: Tensor, mapped: Array, pieces: Array) -> Tensor:
    """Add the probabilities of teacher pieces [S] with the same student piece: logits [G,S] become
    logits [G,P] of the student's `pieces` [P], which ascend. `mapped` [S] is the student piece of
    each teacher piece, or -1."""
    sums = torch.full((len(logits), len(pieces)), -torch.inf)
    shared = np.flatnonzero(mapped >= 0)
    slot = np.searchsorted(pieces, mapped[shared])
    for columns in _without_repeats(slot):
        slots = torch.from_numpy(slot[columns])
        sums[:, slots] = torch.logaddexp(sums[:, slots], logits[:, shared[columns]])
    return sums


def _without_repeats(slot: Array) -> Iterator[Array]:
    """Split the columns [S] into groups in which no `slot` is repeated."""
    # An indexed assignment stores only one of several values for the same index.
    order = np.argsort(slot, kind="stable")
    counts = np.bincount(slot)
    turn = ranges(np.zeros_like(counts), counts)  # number of earlier columns with the same slot
    for number in range(turn.max(initial=-1) + 1):
        yield order[turn == number]


def _drawn(logits: Logits, rows: Array) -> tuple[Array, Array, Array]:
    """Pad ragged draws: ids [G,K], log shares [G,K] and rest [G]; empty slots have -inf."""
    counts = (logits.start[rows + 1] - logits.start[rows]).astype(np.int64)
    slot = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    index = (logits.start[rows][:, None] + np.arange(slot.shape[1]))[slot]
    ids = np.zeros(slot.shape, np.int64)
    share = np.zeros(slot.shape)
    ids[slot], share[slot] = logits.ids[index], logits.counts[index] / logits.draws
    with np.errstate(divide="ignore"):
        # The shares of the draws sum to 1, so nothing is left for a rest.
        return ids, np.log(share), np.full(len(rows), -np.inf)


def word_begins(batch: Batch) -> Array:
    """Return which teacher tokens start a word: bool [N].

    A token starts a word if its first character that is not white space does. The words of a text
    with tags are separated only by white space, as in the tagged file. In a text without tags,
    single Chinese and Japanese characters and punctuation marks are words too, as in
    `student-predict`.
    """
    begins = np.zeros(len(batch.token_ids), bool)
    for text, first, last in zip(batch.texts, batch.start[:-1], batch.start[1:], strict=True):
        tagged = batch.tags is not None and (batch.tags[first:last] >= 0).any()
        words = [word.span() for word in re.finditer(r"\S+", text)] if tagged else word_spans(text)
        # A last word beyond the text, so that the search below finds a next word for each token.
        start, stop = np.array([*words, (len(text) + 1, len(text) + 1)]).T
        begin, end = batch.offsets[first:last].T
        # Not the word at `begin`: some tokenizers add the space to the following word.
        following = np.searchsorted(start, begin)
        at, free = start[following], np.append(0, stop)[following] <= begin
        tokens = np.flatnonzero((at < end) & free & ~batch.special[first:last])
        # Several byte-level tokens may share one character: only the first begins the word.
        _, leading = np.unique(at[tokens], return_index=True)
        begins[first + tokens[leading]] = True
    return begins
