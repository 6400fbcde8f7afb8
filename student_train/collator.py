"""From a batch of the store to what a student step needs: tokenised, masked, aligned, pooled on the
teacher's side."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from align import (
    Alignment,
    AlignmentError,
    FlatText,
    Tokens,
    Vocabulary,
    VocabularyMap,
    align_match,
    align_reduce,
    align_span,
)
from store import Batch, FeatureStore
from store.errors import VERIFY, StoreError, UserError
from student_train import losses
from student_train.batches import Distillation, Inputs, StudentBatch
from student_train.masking import IGNORED, MaskedTokens, Masker
from student_train.options import TrainOptions
from student_train.pooling import MapPooling, Runs
from student_train.targets import LogitTargets, TargetReader, TaskTargets, first_pieces
from student_train.token_cache import token_table, tokenize


class Collator:
    """Turns store batches into student batches for one vocabulary, and the alignment, losses and
    masks of `options`.

    `head` (weight [V,D], bias [V]) is needed for logit losses from the `head` tier. With `store`
    its text is tokenised once for all batches (`token_table`), without it each batch anew.
    Raises UserError for a tokenizer that `align` cannot read.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer_json: str,
        options: TrainOptions,
        *,
        max_length: int,
        head: tuple[np.ndarray, np.ndarray] | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        self.student_tokenizer = student_tokenizer
        self.tokenizer = copy.deepcopy(student_tokenizer.backend_tokenizer)  # which is saved uncut
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_length)
        self.table = None if store is None else token_table(store, self.tokenizer)
        self.padding = student_tokenizer.pad_token_id
        self.align, self.max_length = options.align, max_length
        self.vocabulary = _vocabulary_map(teacher_tokenizer_json, self.tokenizer.to_str())
        pieces = first_pieces(self.vocabulary) if self.align == "span" else self.vocabulary.match
        self.targets = TargetReader(pieces, head)
        self.task = store.features.task if store else None
        self._serve(options)

    def serving(self, options: TrainOptions) -> Collator:
        """The same for a stage with other losses and masks."""
        other = copy.copy(self)
        other._serve(options)
        return other

    def _serve(self, options: TrainOptions) -> None:
        names = set(options.loss)
        self.masker = Masker(
            self.student_tokenizer.mask_token_id,
            len(self.student_tokenizer),
            set(self.student_tokenizer.all_special_ids),
            0.0 if self.task else options.mask_prob,  # the student of a task reads the plain text
            self.table.counts(len(self.student_tokenizer))
            if options.mask_words == "rare" and self.table
            else None,
        )
        self.wants_normalised = bool(names & {"hidden", "hidden-sum", "hidden-kld"})
        self.wants_states = bool(names & {"cosine", "contrastive"})
        self.wants_sentences = bool(names & set(losses.OF_SENTENCE))
        self.wants_task = bool(self.task and names & set(losses.OF_TASK))
        self.wants_logits = not self.task and bool(names & set(losses.OF_LOGITS))
        self.wants_maps = "attention" in names
        self.wants_teacher = bool(names - {"mlm"})
        self.masked_only = options.targets == "masked"

    def features(self) -> list[str]:
        """The groups of the store that have to be read."""
        wanted = {
            "hidden": self.wants_normalised or self.wants_states or self.wants_sentences,
            "logits": self.wants_logits,
            "task": self.wants_task,
            "attention": self.wants_maps,
        }
        return [name for name, needed in wanted.items() if needed]

    def __call__(self, batch: Batch, view: int, key: tuple[int, ...]) -> StudentBatch:
        """`key` seeds the masks; in view 0 they are drawn anew, in other views they are the
        teacher's."""
        native = self._native(batch)
        if view:
            read = self.masker.stored(native, batch.spans, batch.spans_start, key)
        else:
            read = self.masker.dynamic(native, key)
        masked = np.flatnonzero(read.labels != IGNORED)
        try:
            taught = self._distillation(batch, native, read, key) if self.wants_teacher else None
        except AlignmentError as error:  # tokens that are not those of the store's texts
            raise StoreError(f"the store cannot be learnt from: {error}; {VERIFY}") from error
        return StudentBatch(
            inputs=Inputs.of(read.ids, native.start, self.padding),
            masked=torch.from_numpy(masked),
            labels=torch.from_numpy(read.labels[masked]),
            characters=int((native.offsets[masked, 1] - native.offsets[masked, 0]).sum()),
            tokens=len(native.ids),
            distillation=taught,
        )

    def _native(self, batch: Batch) -> Tokens:
        """The student's own tokens of each text, cut at its max length."""
        if self.table is None:
            return tokenize(self.tokenizer, batch.texts)
        return self.table.of(batch.index)

    def _distillation(
        self, batch: Batch, native: Tokens, read: MaskedTokens, key: tuple[int, ...]
    ) -> Distillation:
        teacher = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        student, inputs = native, None
        if self.align == "reduce":
            reduced = align_reduce(teacher, self.vocabulary, self.max_length)
            student, alignment = reduced.tokens, reduced.alignment
            # What the teacher saw masked, the student sees masked; in view 0 that is nothing.
            read = self.masker.stored(student, batch.spans, batch.spans_start, key)
            inputs = Inputs.of(read.ids, student.start, self.padding)
        else:
            text = FlatText.of(batch.texts)
            alignment = (
                align_match(text, teacher, native, self.vocabulary)
                if self.align == "match"
                else align_span(text, teacher, native)
            )
        teacher_runs = Runs.of(alignment.teacher)
        hidden = batch.hidden.items()
        maps, map_pooling = (
            self._maps(batch, alignment, student.start) if self.wants_maps else ({}, None)
        )
        logit_runs, logits = (
            self._logits(batch, alignment, read.labels) if self.wants_logits else (None, None)
        )
        return Distillation(
            inputs=inputs,
            runs=Runs.of(alignment.student),
            normalised=(
                {n: self._pooled(h.normalised(), teacher_runs) for n, h in hidden}
                if self.wants_normalised
                else {}
            ),
            states=(
                {n: self._pooled(h.states(), teacher_runs) for n, h in hidden}
                if self.wants_states
                else {}
            ),
            sentences=(
                {n: torch.from_numpy(h.normalised()[batch.start[:-1]]) for n, h in hidden}
                if self.wants_sentences
                else {}
            ),
            logit_runs=logit_runs,
            logits=logits,
            maps=maps,
            map_pooling=map_pooling,
            task=self._task(batch, alignment) if self.wants_task else None,
        )

    def _task(self, batch: Batch, alignment: Alignment) -> TaskTargets:
        """Of each text, or of the tokens that begin a word: the first piece of a word speaks for
        it. Of all tokens where the teacher has a label for a word's other pieces, too."""
        if batch.labels is not None:
            return TaskTargets(None, _float(batch.class_logits), _long(batch.labels))
        assert batch.tags is not None and self.task is not None
        runs = alignment.teacher[:, 0]
        if self.task.later_label is None:
            tagged = word_begins(batch) | (batch.tags >= 0)
        else:
            tagged = ~batch.special
        chosen = tagged[runs]
        rows = runs[chosen]
        logits = None if batch.tag_logits is None else batch.tag_logits[rows]
        return TaskTargets(
            _long(alignment.student[chosen, 0]), _float(logits), _long(batch.tags[rows])
        )

    @staticmethod
    def _pooled(values: np.ndarray, runs: Runs) -> Tensor:
        return runs.pool(torch.from_numpy(values), "mean")

    def _logits(
        self, batch: Batch, alignment: Alignment, labels: np.ndarray
    ) -> tuple[Runs, LogitTargets]:
        """Targets of the runs with a single teacher token: only they have a distribution."""
        chosen = alignment.teacher[:, 1] - alignment.teacher[:, 0] == 1
        if self.masked_only:
            chosen &= labels[alignment.student[:, 0]] != IGNORED
        rows = alignment.teacher[chosen, 0]
        assert batch.logits is not None
        targets, some = self.targets.of(batch.logits, rows)
        student = alignment.student[chosen][some]
        if self.align == "span":  # the first token predicts the first piece, the target's meaning
            student = np.stack([student[:, 0], student[:, 0] + 1], axis=1)
        return Runs.of(student), targets

    def _maps(
        self, batch: Batch, alignment: Alignment, student_start: np.ndarray
    ) -> tuple[dict[str, Tensor], MapPooling]:
        teacher = MapPooling.of(alignment.teacher, batch.start)
        lengths = np.diff(batch.start)
        square = np.concatenate([[0], np.cumsum(lengths**2)])
        pooled = {}
        for name, flat in batch.attention.items():
            maps = np.zeros((len(lengths), lengths.max(), lengths.max()), np.float32)
            for b, length in enumerate(lengths):
                maps[b, :length, :length] = flat[square[b] : square[b + 1]].reshape(length, length)
            pooled[name] = teacher.pool(torch.from_numpy(maps))
        return pooled, MapPooling.of(alignment.student, student_start)


def _float(values: np.ndarray | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(np.array(values, np.float32))


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def word_begins(batch: Batch) -> np.ndarray:
    """bool [N]: teacher tokens whose first character that is no blank, which some tokenizers count
    with the word that follows, begins the text or comes after a blank."""
    begins = np.zeros(len(batch.token_ids), bool)
    for text, first, last in zip(batch.texts, batch.start[:-1], batch.start[1:], strict=True):
        blank = np.array([character.isspace() for character in f" {text} "], bool)
        places = np.where(blank[1:], len(text), np.arange(len(text) + 1))
        inked = np.minimum.accumulate(places[::-1])[::-1]  # the next character that is no blank
        begin, end = batch.offsets[first:last].T
        at = inked[begin]
        found = np.flatnonzero((at < end) & blank[at] & ~batch.special[first:last])
        _, leading = np.unique(at[found], return_index=True)  # of the bytes of one character
        begins[first + found[leading]] = True
    return begins


def _vocabulary_map(teacher: str, student: str) -> VocabularyMap:
    try:
        return VocabularyMap.between(
            Vocabulary.from_tokenizer_json(teacher), Vocabulary.from_tokenizer_json(student)
        )
    except AlignmentError as error:
        raise UserError(
            f"the tokenizers of teacher and student cannot be aligned: {error}"
        ) from error
