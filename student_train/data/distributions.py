"""Selects the teacher's distributions of a batch, as targets over the student's pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from teachonce.align import Alignment, Tokenizations, Tokens, VocabularyMap
from teachonce.align.places import maps_at
from teachonce.store import Batch, LogitsSpec
from teachonce.student_train.data.batch import Runs
from teachonce.student_train.data.next_tokens import (
    chunk_targets,
    head_targets,
    next_pieces,
    observed_logprobs,
    predicting_tokens,
    whole_head,
)
from teachonce.student_train.data.targets import TargetReader, first_pieces
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.losses.next_token import ChunkTargets, HeadTargets, NextTargets
from teachonce.student_train.losses.registry import features_of
from teachonce.student_train.settings.terms import ALIGNMENTS, Strategy
from teachonce.support.arrays import Array

Predicted = Callable[[Array], Array]
"""Takes half-open runs [G,2] of student tokens, and returns which are predicted: bool [G]."""


@dataclass(frozen=True)
class Aligned:
    """Holds what the losses of one alignment read: feature groups of the store, and the values of
    `Loss.teacher`."""

    name: str
    strategy: Strategy
    features: list[str]
    teacher: set[str]

    @classmethod
    def by(cls, name: str, terms: Sequence[Term]) -> Aligned:
        losses = [term.loss for term in terms if term.alignment == name]
        return cls(name, ALIGNMENTS[name], features_of(losses), {loss.teacher for loss in losses})

    @property
    def reader_key(self) -> tuple[str, bool]:
        """Return what determines the student piece that is the target of a teacher piece."""
        return self.strategy.predicted, self.strategy.second_input


class Distributions:
    """Turns stored logits into targets for one vocabulary of a student.

    tokenizer: the student's.
    head: weight [V,D] and bias [V] of the teacher's head, for the `head` tier.
    spec: describes the stored logits.
    exact: a decoder with the teacher's vocabulary is compared over all pieces of the `head` tier.
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
        # The pieces of a WordPiece, or with suffixes, have no space, whatever the text has.
        self._spaces_by_text = styles[0] != "blank" and styles[1] == "blank"
        self._readers = dict[tuple[str, bool], TargetReader]()  # by `Aligned.reader_key`

    def prepare(self, aligned: Aligned, *, causal: bool) -> None:
        """Make the table of student pieces that the losses of an alignment read, if any."""
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
        """Return the student's tokens before each run, as runs of one token, and the teacher's
        distribution over the piece that comes next there: stored, or as the input of its head if
        `whole` is set; the other one is None."""
        rows, positions = predicting_tokens(alignment, sides.teacher, student)
        teacher_begins, student_begins = self.vocabulary.begins
        spaced, map_index = student_begins[student.ids[positions + 1]], None
        if self._spaces_by_text:
            map_index = spaced.astype(np.int64)
        else:
            # If only one of the two next tokens has a space, the student's piece is not the mapped
            # one. It happens at the start of a text, where some tokenizers add a space.
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
            return runs, None, head_targets(batch.logits, rows, following, self.whole)
        return runs, NextTargets(**vars(targets), following=following), None

    def of_runs(
        self,
        batch: Batch,
        aligned: Aligned,
        sides: Tokenizations,
        alignment: Alignment,
        predicted: Predicted,
    ) -> tuple[Runs, LogitTargets | None, SharedTargets | None]:
        """Return the runs with a single teacher token whose tokens are `predicted`, and the
        teacher's targets for the piece that is there: over all pieces and over shared ones, each
        None if no loss reads it."""
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
