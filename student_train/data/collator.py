"""The collator turns a batch of a store into a batch for a student: it tokenizes, masks, aligns and
selects the teacher's targets."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teachonce.align import AlignmentError, Tokenizations, Tokens
from teachonce.store import Batch, FeatureStore
from teachonce.store.errors import NO_PATH, VERIFY, StoreError
from teachonce.student_train.data.batch import (
    Distillation,
    Inputs,
    MapPooling,
    Runs,
    StreamedFeatures,
    StudentBatch,
    TeacherMaps,
    TeacherStates,
)
from teachonce.student_train.data.cache import ResidentFeatures
from teachonce.student_train.data.distributions import Aligned, Distributions
from teachonce.student_train.data.next_tokens import (
    following,
    inside_tokens,
    last_tokens,
    learnt_of_student,
    learnt_runs,
    predicted_bytes,
)
from teachonce.student_train.data.own_template import OwnTemplate, covers_any
from teachonce.student_train.data.student_tokens import (
    IGNORED,
    MaskedTokens,
    Masker,
    pair_types,
    tokenize,
)
from teachonce.student_train.data.task_targets import TaskTargets
from teachonce.student_train.data.token_cache import token_table
from teachonce.student_train.data.vocabularies import vocabulary_map
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.student_train.losses.next_token import ChunkTargets, HeadTargets
from teachonce.student_train.losses.registry import features_read, reads_masked_tokens
from teachonce.student_train.settings.options import BatchPlan
from teachonce.support.arrays import Array, starts
from teachonce.support.console import counted
from teachonce.support.errors import UserError


class Collator:
    """Turns store batches into student batches for one vocabulary.

    plan: its terms determine the alignments and targets of a batch.
    head: weight [V,D] and bias [V] of the teacher's head, for losses on logits of the `head` tier.
    exact: whether a decoder with the teacher's vocabulary is compared over all pieces of the `head`
        tier.
    store: if given, its text is tokenized once for all batches (`token_table`), else batch by
        batch. The store's chats are rendered with the student's own chat template, if any.

    Raises UserError for a tokenizer that `align` cannot read, and for masks of rare pieces without
    `store`, which has their counts.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer_json: str,
        plan: BatchPlan,
        *,
        max_length: int,
        head: tuple[Array, Array] | None = None,
        exact: bool = True,
        store: FeatureStore | None = None,
    ) -> None:
        self.student_tokenizer = student_tokenizer
        # A copy: truncation must not be saved with the student's tokenizer.
        self.tokenizer = copy.deepcopy(student_tokenizer.backend_tokenizer)
        # `Inputs.of` pads batches: the table must not have padding.
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_length, direction=student_tokenizer.truncation_side)
        self.own_template = None
        if store is not None and plan.options.shape.causal:
            self.own_template = OwnTemplate.of(student_tokenizer, store)
        texts = self.own_template.texts() if self.own_template else None
        self.table = None if store is None else token_table(store, self.tokenizer, texts)
        self.padding = student_tokenizer.pad_token_id
        self.max_length = max_length
        self.vocabulary = vocabulary_map(teacher_tokenizer_json, self.tokenizer.to_str())
        self.path = store.path if store else NO_PATH
        spec = store.features.logits if store else None
        self.distributions = Distributions(self.vocabulary, self.tokenizer, head, spec, exact=exact)
        self.task = store.task if store else None
        self.separator = self.task.separator if self.task else None
        self.source: StreamedFeatures | ResidentFeatures = StreamedFeatures()
        self._serve(plan)

    def cut_line(self) -> str:
        """Describe how many sequences are truncated at `--max-length`; "" if none is."""
        if self.table is None:
            return ""
        lengths = np.diff(self.table.start)
        # A text that was cut and a text that just fits have the same number of tokens.
        full = int((lengths >= self.max_length).sum())
        if not full:
            return ""
        return (
            f"{full:,} of {counted(len(lengths), 'sequence')} have {self.max_length} tokens of the"
            f" student or more: what is beyond --max-length {self.max_length} is not read"
        )

    def serving(self, plan: BatchPlan) -> Collator:
        """Return a copy for batches with the losses and masks of another batch plan."""
        # Shallow: both share the token table, the vocabulary map and `distributions`.
        collator = copy.copy(self)
        collator._serve(plan)
        return collator

    def reading(self, source: StreamedFeatures | ResidentFeatures) -> Collator:
        """Return a copy that takes the teacher's states and maps from `source`."""
        collator = copy.copy(self)
        collator.source = source
        return collator

    def _serve(self, plan: BatchPlan) -> None:
        losses, options = [term.loss for term in plan.terms], plan.options
        self.causal, rare = options.shape.causal, options.mask_words == "rare"
        # Stores of a task are read from view 0, which the teacher has read without masks.
        unmasked = self.causal or self.task or not reads_masked_tokens(losses)
        if rare and self.table is None and not unmasked:
            raise UserError(
                "--mask-words rare: pieces are masked by their counts in a store's text; give"
                " Collator its store, or use uniform"
            )
        self.masker = Masker(
            # A decoder's tokenizer may have no mask token, and none of its tokens is masked.
            -1 if self.causal else self.student_tokenizer.mask_token_id,
            len(self.student_tokenizer),
            set(self.student_tokenizer.all_special_ids),
            0.0 if unmasked else options.mask_prob,
            self.table.counts if rare and self.table else None,
            options.max_masks,
        )
        self.feature_groups = features_read(losses)
        names = dict.fromkeys(term.alignment for term in plan.terms if term.alignment)
        self.alignments = {name: Aligned.by(name, plan.terms) for name in names}
        for aligned in self.alignments.values():
            self.distributions.prepare(aligned, causal=self.causal)
        self.targets = options.targets

    @property
    def has_all_logits(self) -> bool:
        """Return whether a batch has a logit for each run and shared piece. These take gigabytes,
        so only one batch is prepared ahead."""
        shared = any("shared" in aligned.teacher for aligned in self.alignments.values())
        return shared and self.distributions.head is not None

    def features(self) -> list[str]:
        """List the feature groups to stream: all except those that `source` already holds."""
        return [name for name in self.feature_groups if name not in self.source.resident]

    def __call__(self, batch: Batch, view: int, key: tuple[int, ...]) -> StudentBatch:
        """Make a student batch from a batch of a view.

        In view 0 the masks are drawn from `key`; other views have the teacher's masks. Raises
        StoreError if the stored tokens do not match the stored texts.
        """
        return self._make_batch(*self._read(batch), view, key)

    def for_validation(self, batch: Batch, view: int, key: tuple[int, ...]) -> StudentBatch:
        """Make a student batch, and count the characters and bytes that it predicts."""
        batch, native, learnt = self._read(batch)
        result, count = self._make_batch(batch, native, learnt, view, key), 0
        predicted = result.masked.numpy() + (1 if self.causal else 0)
        if self.causal:
            pieces = self.vocabulary.student_bytes
            count = predicted_bytes(batch.texts, native, pieces, learnt)
        return replace(result, characters=_characters(native, predicted), predicted_bytes=count)

    def _make_batch(
        self,
        batch: Batch,
        native: Tokens,
        learnt: Array | None,
        view: int,
        key: tuple[int, ...],
    ) -> StudentBatch:
        if self.causal:
            tokens = following(native, learnt)
        elif view:
            tokens = self.masker.stored(native, batch.spans, batch.spans_start, key)
        else:
            tokens = self.masker.dynamic(native, key)
        masked = np.flatnonzero(tokens.labels != IGNORED)
        vectors = "embedding" in self.feature_groups
        # The teacher computed its text vector from the unmasked text, so the student must, too.
        second = vectors and not np.array_equal(tokens.ids, native.ids)
        try:
            aligned = self._aligned(batch, native, tokens, view, key)
        except AlignmentError as error:
            raise StoreError(
                f"{self.path}: its tokens do not match its texts: {error}; {VERIFY}"
            ) from error
        return StudentBatch(
            inputs=self._inputs(tokens.ids, native),
            masked=torch.from_numpy(masked),
            labels=torch.from_numpy(tokens.labels[masked]),
            tokens=len(native.ids),
            aligned=aligned,
            # A copy: the stream reuses a batch's arrays for a later one.
            vectors=torch.from_numpy(np.array(batch.embedding, np.float32)) if vectors else None,
            unmasked=self._inputs(native.ids, native) if second else None,
        )

    def _inputs(self, ids: Array, tokens: Tokens) -> Inputs:
        types = None if self.separator is None else tokens.types
        return Inputs.of(ids, tokens.start, self.padding, types)

    def _read(self, batch: Batch) -> tuple[Batch, Tokens, Array | None]:
        """Return the batch with the texts that the student reads, the student's tokens, and the
        tokens that a decoder is trained on: bool [N]; None for all."""
        marks = None
        if self.own_template:
            batch, marks = self.own_template.of_batch(batch)
        native = self._native(batch)
        if not self.causal or batch.learnt is None:
            return batch, native, None
        teacher = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        learnt = learnt_of_student(batch.learnt, teacher, native)
        if marks is not None:
            learnt &= ~covers_any(marks, batch.texts, native)
        return batch, native, learnt

    def _native(self, batch: Batch) -> Tokens:
        """Tokenize each text for the student, truncated at its max length."""
        if self.table is None:
            return tokenize(self.tokenizer, batch.texts, self.separator)
        return self.table.of(batch.index)

    def _aligned(
        self, batch: Batch, native: Tokens, tokens: MaskedTokens, view: int, key: tuple[int, ...]
    ) -> dict[str, Distillation]:
        teacher = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        if self.separator is not None:
            types = pair_types(teacher, batch.texts, self.separator)
            # Under `reduce` a student reads these types. If its own tokenizer gives both texts of
            # a pair type 0, it must not read a 1 here.
            typed = native.types is not None and native.types.any()
            teacher = replace(teacher, types=types if typed else np.zeros_like(types))
        sides = Tokenizations(batch.texts, teacher, native, self.vocabulary, self.max_length)
        return {
            name: self._distillation(batch, sides, aligned, tokens, view, key)
            for name, aligned in self.alignments.items()
        }

    def _distillation(
        self,
        batch: Batch,
        sides: Tokenizations,
        aligned: Aligned,
        tokens: MaskedTokens,
        view: int,
        key: tuple[int, ...],
    ) -> Distillation:
        student, alignment = sides.align(aligned.name)
        if tokens.learnt is not None:
            alignment = learnt_runs(alignment, tokens.learnt)
        inputs = None
        if aligned.strategy.second_input:
            # The student sees the teacher's masks in its second input; view 0 has none.
            tokens = self.masker.stored(student, batch.spans, batch.spans_start, key)
            inputs = self._inputs(tokens.ids, student)
        logit_runs: Runs | None = None
        logits: LogitTargets | None = None
        head: HeadTargets | None = None
        shared: SharedTargets | None = None
        chunks: ChunkTargets | None = None
        if "observed" in aligned.teacher:
            chunks = self.distributions.of_chunks(batch, sides, student, alignment)
        inside: Tensor | None = None
        if "edges" in aligned.teacher:
            inside = inside_tokens(alignment, tokens.labels)
        if "distribution" in aligned.teacher and self.causal:
            logit_runs, logits, head = self.distributions.of_next(
                batch, aligned, sides, student, alignment
            )
        elif "logits" in aligned.features and not self.causal:
            predicted = partial(self._predicted, tokens.labels)
            logit_runs, logits, shared = self.distributions.of_runs(
                batch, aligned, sides, alignment, predicted
            )
        # Only now: the targets of next tokens above need whole runs.
        if self.causal:
            alignment = last_tokens(alignment)
        return Distillation(
            inputs=inputs,
            runs=Runs.of(alignment.student),
            logit_runs=logit_runs,
            logits=logits,
            shared=shared,
            chunks=chunks,
            inside=inside,
            head=head,
            map_pooling=(
                MapPooling.of(alignment.student, student.start)
                if "attention" in aligned.features
                else None
            ),
            task=(
                TaskTargets.of(batch, alignment, self.task) if "task" in aligned.features else None
            ),
            encoded=self._encoded(batch, aligned, view, alignment.teacher),
        )

    def _encoded(
        self, batch: Batch, aligned: Aligned, view: int, runs: Array
    ) -> dict[str, dict[str, TeacherStates] | TeacherMaps]:
        """Select the teacher's encoded states and maps, by `Loss.teacher`, for half-open runs [G,2]
        of its tokens."""
        encoded = dict[str, dict[str, TeacherStates] | TeacherMaps]()
        if sides := sorted({"normalised", "raw"} & aligned.teacher):
            tokens = Runs.of(runs)
            states = self.source.states(batch, view, tokens.member.numpy(), tokens.begin)
            encoded |= dict.fromkeys(sides, states)
        if sides := sorted({"sentence", "raw sentence"} & aligned.teacher):
            first = batch.start[:-1]
            states = self.source.states(batch, view, first, torch.arange(len(first)))
            encoded |= dict.fromkeys(sides, states)
        if "maps" in aligned.teacher:
            values, begin, codec = self.source.maps(batch, view)
            encoded["maps"] = TeacherMaps(
                values,
                codec,
                torch.from_numpy(begin),
                torch.from_numpy(np.diff(batch.start)),
                int(np.diff(batch.start).max()),
                MapPooling.of(runs, batch.start),
            )
        return encoded

    def _predicted(self, labels: Array, runs: Array) -> Array:
        """Return which runs [G,2] of student tokens have logit targets, by `--targets`:
        bool [G]."""
        if self.targets == "masked":
            return np.asarray(labels[runs[:, 0]] != IGNORED)
        if self.targets == "unmasked":
            masked = starts(labels != IGNORED)  # masked tokens before each token
            return np.asarray(masked[runs[:, 0]] == masked[runs[:, 1]])
        return np.ones(len(runs), bool)


def _characters(tokens: Tokens, positions: Array) -> float:
    """Count the characters of the tokens at flat `positions`. If several byte-level tokens share
    the same offsets, each counts as an equal fraction of their characters, so that vocabularies are
    comparable."""
    text = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    spans = np.column_stack([text, tokens.offsets])
    new = np.append(True, (spans[1:] != spans[:-1]).any(axis=1))[: len(spans)]
    group = np.cumsum(new) - 1
    shares = np.bincount(group, minlength=1)[group[positions]]
    return float(((spans[positions, 2] - spans[positions, 1]) / shares).sum())
