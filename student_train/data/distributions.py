"""Selects the teacher's distributions of a batch as targets, mapped to the student's pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teachonce.align import Alignment, Tokenizations, Tokens, VocabularyMap
from teachonce.align.places import maps_at
from teachonce.store import Batch, Logits, LogitsSpec
from teachonce.student_train.data.batch import Runs
from teachonce.student_train.data.next_tokens import (
    chunk_targets,
    next_pieces,
    observed_logprobs,
    predicting_tokens,
    whole_head,
)
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.losses.next_token import ChunkTargets, HeadTargets, NextTargets
from teachonce.student_train.losses.registry import features_read
from teachonce.student_train.settings.terms import ALIGNMENTS, Strategy
from teachonce.support.arrays import Array, ranges

# With this limit `kl` of the head tier is not exact; `kl-shared` compares all shared pieces. A
# student has 4.84 nats, with `topk:160` 4.86 (RESULTS, "Quality by tier").
HEAD_BEST = 256  # best shared pieces that become targets of the head tier; the others join the rest

Predicted = Callable[[Array], Array]
"""Takes half-open runs [G,2] of student tokens, and returns which are predicted: bool [G]."""


@dataclass(frozen=True)
class Aligned:
    """Describes what the losses of the alignment `name` read: `features`, groups of the store, and
    `teacher`, the values of `Loss.teacher`."""

    name: str
    strategy: Strategy
    features: list[str]
    teacher: set[str]

    @classmethod
    def by(cls, name: str, terms: Sequence[Term]) -> Aligned:
        losses = [term.loss for term in terms if term.alignment == name]
        return cls(name, ALIGNMENTS[name], features_read(losses), {loss.teacher for loss in losses})

    @property
    def reader_key(self) -> tuple[str, bool]:
        """Return the key of a `TargetReader`: alignments with equal keys share a reader."""
        return self.strategy.predicted, self.strategy.second_input


class Distributions:
    """Turns stored logits into targets for one vocabulary of a student.

    tokenizer: the student's.
    head: weight [V,D] and bias [V] of the teacher's head, for the `head` tier.
    spec: describes the stored logits.
    exact: whether a decoder with the teacher's vocabulary is compared over all pieces of the `head`
        tier.
    """

    def __init__(
        self,
        vocabulary: VocabularyMap,
        tokenizer: Any,
        head: tuple[Array, Array] | None,
        spec: LogitsSpec | None,
        *,
        exact: bool,
    ) -> None:
        self.vocabulary, self.tokenizer = vocabulary, tokenizer
        self.head, self.spec = head, spec
        self.whole = None
        if exact and head is not None:
            self.whole = whole_head(vocabulary, tokenizer.get_vocab_size(), head, spec)
        styles = vocabulary.teacher.marks.style, vocabulary.student.marks.style
        # Pieces of a WordPiece, and pieces that mark the end of a word, never contain a space.
        self._spaces_by_text = styles[0] != "blank" and styles[1] == "blank"
        self._readers = dict[tuple[str, bool], TargetReader]()  # by `Aligned.reader_key`

    def prepare(self, aligned: Aligned, *, causal: bool) -> None:
        """Make the `TargetReader` of an alignment, if its losses need one."""
        # With the teacher's vocabulary, targets are computed from the head: nothing is folded.
        exact = causal and self.whole is not None
        read = aligned.teacher & {"distribution", "logits", "shared"} and not exact
        if not read or aligned.reader_key in self._readers:
            return
        strategy = aligned.strategy
        # `align_reduce` splits only by the first map, also at the start of a word. A decoder's
        # pieces are found by their bytes.
        single = strategy.second_input or causal
        maps = (self.vocabulary,) if single else self.vocabulary.maps
        if strategy.predicted != "first":
            pieces = np.stack([mapping.match for mapping in maps])
        elif causal:
            blanks = (False, True) if self._spaces_by_text else (False,)
            tables = (next_pieces(self.vocabulary, self.tokenizer, blank=blank) for blank in blanks)
            pieces = np.stack([*tables])
        else:
            pieces = np.stack([first_pieces(mapping) for mapping in maps])
        self._readers[aligned.reader_key] = TargetReader(pieces, self.head, self.spec)

    def of_next(
        self,
        batch: Batch,
        aligned: Aligned,
        sides: Tokenizations,
        student: Tokens,
        alignment: Alignment,
    ) -> tuple[Runs, LogitTargets | None, HeadTargets | None]:
        """Return the positions at which a decoder predicts, and the teacher's distributions there.

        A position is the student's token before a run of the alignment, returned as a run of one
        token. The distributions are LogitTargets from the stored logits, and the third value is
        None. If the student has the teacher's vocabulary (`whole`), they are HeadTargets with the
        inputs of the teacher's head, and the second value is None.
        """
        rows, positions = predicting_tokens(alignment, sides.teacher, student)
        teacher_begins, student_begins = self.vocabulary.begins
        spaced, map_index = student_begins[student.ids[positions + 1]], None
        if self._spaces_by_text:
            map_index = spaced.astype(np.int64)
        else:
            # If only one of the two next tokens begins with a space, the student's piece is not the
            # mapped one. It happens at the start of a text, where some tokenizers add a space.
            same = teacher_begins[sides.teacher.ids[rows + 1]] == spaced
            rows, positions = rows[same], positions[same]
        assert batch.logits is not None
        targets = None
        if self.whole is None:
            targets, has_piece = self._readers[aligned.reader_key].of(batch.logits, rows, map_index)
            positions = positions[has_piece]
        following = torch.from_numpy(np.asarray(student.ids[positions + 1], np.int64))
        runs = Runs.of(np.stack([positions, positions + 1], axis=1))
        if self.whole is not None:
            inputs = (batch.logits.values, batch.logits.log_partition)
            values, partition = (torch.from_numpy(np.array(x[rows], np.float32)) for x in inputs)
            return runs, None, HeadTargets(values, partition, following, self.whole)
        return runs, NextTargets(**vars(targets), following=following), None

    def of_runs(
        self,
        batch: Batch,
        aligned: Aligned,
        sides: Tokenizations,
        alignment: Alignment,
        predicted: Predicted,
    ) -> tuple[Runs, LogitTargets | None, SharedTargets | None]:
        """Return the runs that have a single teacher token and are `predicted`, and the teacher's
        targets at these runs: over all pieces, and over shared pieces. Targets that no loss reads
        are None."""
        targets, shared, student = None, None, alignment.student
        if aligned.strategy.predicted == "first":  # the first token of a run predicts it
            student = np.stack([student[:, 0], student[:, 0] + 1], axis=1)
        # Several teacher tokens have several distributions, and no joint one is stored.
        keep = alignment.teacher[:, 1] - alignment.teacher[:, 0] == 1
        keep &= predicted(student)
        rows, reader = alignment.teacher[keep, 0], self._readers[aligned.reader_key]
        assert batch.logits is not None
        map_index = None
        if len(reader.pieces) > 1:
            # Whole runs: a vocabulary of suffixes marks their last token.
            both = rows, alignment.student[keep]
            map_index = maps_at(sides.text, sides.teacher, sides.student, self.vocabulary, both)
        if aligned.teacher & {"distribution", "logits"}:
            targets, has_piece = reader.of(batch.logits, rows, map_index)
        if "shared" in aligned.teacher:
            shared, has_piece = reader.shared_of(batch.logits, rows, map_index)
        return Runs.of(student[keep][has_piece]), targets, shared

    def of_chunks(
        self, batch: Batch, sides: Tokenizations, student: Tokens, alignment: Alignment
    ) -> ChunkTargets:
        """Return the runs of the text, with the teacher's log-probability of each."""
        assert batch.logits is not None
        observed = observed_logprobs(batch.logits, batch.token_ids, self.head, self.spec)
        return chunk_targets(alignment, sides.teacher, student, observed)


def fold(
    ids: Array,
    logprobs: Array,
    rest: Array,
    log_partition: Array,
    vocabulary: Array,
) -> tuple[LogitTargets, Array]:
    """Map stored teacher probabilities [G,K] to student pieces. Return the targets, and bool [G]:
    which rows have a student piece. Other rows are left out of the targets.

    `vocabulary` [Vt] is the student piece of each teacher piece, or -1. Probabilities of teacher
    pieces with the same student piece are added. Pieces without a student piece are added to the
    rest. So the probabilities of a row still sum to one. Sums are float64, the targets have the
    dtype of `log_partition`.
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

    pieces: the student piece of each teacher piece, or -1: [Vt]. If it depends on the position of a
        token in its word, [2,Vt]: row 0 inside a word, row 1 at its start. The argument `map_index`
        of methods, int64 [G], is the row for each token; None if `pieces` has one row.
    head: weight [V,D] and bias [V] of the teacher's head, for the head tier.
    spec: has the soft cap of this head's logits.
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
        """Return the targets of the teacher's tokens `rows` [G], and bool [G]: which rows have
        targets (see `fold`)."""
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
        """Return the targets of the teacher's tokens `rows` [G] over the shared pieces, and bool
        [G]: which rows have targets.

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
    """Return the logits [G,P] of the student's `pieces` [P], which ascend, from logits [G,S] of
    teacher pieces. Probabilities of teacher pieces with the same student piece are added. `mapped`
    [S] is the student piece of each teacher piece, or -1."""
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
    """Return the random draws of `rows` as padded arrays: the drawn ids [G,K], the log [G,K] of
    each id's share of the draws, and the log [G] of the rest, -inf. Empty slots have a log share of
    -inf."""
    counts = (logits.start[rows + 1] - logits.start[rows]).astype(np.int64)
    slot = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    index = (logits.start[rows][:, None] + np.arange(slot.shape[1]))[slot]
    ids = np.zeros(slot.shape, np.int64)
    share = np.zeros(slot.shape)
    ids[slot], share[slot] = logits.ids[index], logits.counts[index] / logits.draws
    with np.errstate(divide="ignore"):
        # The shares of the draws sum to 1, so nothing is left for a rest.
        return ids, np.log(share), np.full(len(rows), -np.inf)
