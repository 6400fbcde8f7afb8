"""Selects the targets of a task: of texts, or of the tokens that start a word."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from teachonce.align import Alignment
from teachonce.store import Batch, TaskSpec
from teachonce.store.format.features import OutputKind
from teachonce.support.arrays import Array
from teachonce.training.words import word_spans


@dataclass(frozen=True)
class TaskTargets:
    """Holds the targets of a task, for G texts or G tokens."""

    tokens: Tensor | None  # int64 [G]: flat student tokens; None: one target per text
    logits: Tensor | None  # float32 [G,C]: the teacher's
    gold: Tensor  # int64 [G], -1 without a label
    output_kind: OutputKind = "one label"

    @classmethod
    def of(cls, batch: Batch, alignment: Alignment, task: TaskSpec | None) -> TaskTargets:
        """Select the targets of a task: of each text, or of the tokens that start a word."""
        if batch.labels is not None:
            output_kind = task.output_kind if task else "one label"
            return cls(None, _float(batch.class_logits), _long(batch.labels), output_kind)
        assert batch.tags is not None and task is not None
        runs = alignment.teacher[:, 0]
        # A word's tag belongs to its first piece, unless the teacher has a label for later pieces.
        if task.later_label is None:
            tagged = word_begins(batch) | (batch.tags >= 0)
        else:
            tagged = ~batch.special
        keep = tagged[runs]
        rows = runs[keep]
        logits = None if batch.tag_logits is None else batch.tag_logits[rows]
        return cls(_long(alignment.student[keep, 0]), _float(logits), _long(batch.tags[rows]))


def _float(values: Array | None) -> Tensor | None:
    # A copy, because the stream reuses a batch's arrays for a later one. `astype` below copies,
    # too.
    return None if values is None else torch.from_numpy(np.array(values, np.float32))


def _long(values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def word_begins(batch: Batch) -> Array:
    """Return which teacher tokens start a word: bool [N].

    A token starts a word if its first character after white space starts one. The words of a text
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
