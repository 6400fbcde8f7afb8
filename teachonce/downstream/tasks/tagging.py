"""The tasks pos and ner: give every word of a sentence a tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from teachonce.downstream.options import check
from teachonce.downstream.tasks.tagged_sentences import Sentence, first_of, read_tagged, word_pieces
from teachonce.downstream.tasks.task_interface import IGNORED, LabelTask
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.teacher_dump.corpus.labelled_text import (
    BEGINNING,
    FIRST,
    OTHER,
    OUTSIDE,
    check_order,
    check_tag,
)

LATER = "X"
"""Label of a word's pieces after its first, as in the code of Mukherjee & Awadallah 2020
(sequence_process in preprocessing.py of microsoft/xtreme-distil-transformers)."""


class Tagging(LabelTask):
    """Tags the words of word<TAB>tag files.

    `labels` are the tags of words and, unless it is None, `later`: the label of a word's pieces
    after its first. Where `later` is None, these pieces take no part in the loss.
    """

    model_class = AutoModelForTokenClassification
    what = "tag"
    later: str | None = None

    def read(self, path: Path) -> list[Sentence]:
        return read_tagged(path)

    def labels_of(self, example: Sentence) -> Sequence[str]:
        return example.tags

    def where(self, example: Sentence, number: int) -> str:
        return example.where(number)

    def known(self) -> list[str]:
        return [label for label in self.labels if label != self.later]

    def prepare(self, splits: Mapping[str, Sequence[Sentence]]) -> None:
        super().prepare(splits)
        if self.later is not None:
            self.labels.append(self.later)

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Sentence]]) -> None:
        self.later = spec.later_label
        super().adopt(spec, splits)

    def head(self) -> dict[str, Any]:
        """Tell `later_label` even where it is None, for the checkpoint may have had one."""
        return super().head() | {"later_label": self.later}

    def encode(
        self, tokenizer: Any, examples: Sequence[Sentence], limit: int
    ) -> list[dict[str, Any]]:
        return encode(tokenizer, examples, self.labels, limit, self.later)

    def words(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Return gold and predicted tags; see `word_tags`."""
        return word_tags(examples, rows, predictions, self.labels, self.later)

    def collator(self, tokenizer: Any) -> Any:
        return DataCollatorForTokenClassification(tokenizer)


class PartsOfSpeech(Tagging):
    """Tags of any kind. The epoch is chosen by macro F1 over the tags that occur in the split."""

    name = "pos"
    measures = {"macro F1": "macro_f1", "accuracy": "accuracy"}
    primary = "macro_f1"

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        from sklearn.metrics import f1_score

        gold, found = self.words(examples, rows, predictions)
        flat, guessed = list(chain(*gold)), list(chain(*found))
        macro = f1_score(flat, guessed, labels=sorted(set(flat)), average="macro", zero_division=0)
        return {"macro_f1": float(macro), "accuracy": _accuracy(gold, found)}


class Entities(Tagging):
    """IOB tags. The epoch is chosen by F1 over whole entities, as seqeval counts them.

    pieces: "first" teaches a model the first piece of a word alone, "all" also the pieces after it,
    as `LATER`. A model that is scored as it is says itself which it was taught.
    """

    name = "ner"
    measures = {"entity F1": "entity_f1", "accuracy": "accuracy"}
    primary = "entity_f1"

    def __init__(self, unseen_labels: str = "refuse", pieces: str = "first") -> None:
        super().__init__(unseen_labels)
        check("pieces", pieces)
        self.later = LATER if pieces == "all" else None

    def options(self) -> dict[str, Any]:
        return {**super().options(), "pieces": "first" if self.later is None else "all"}

    def prepare(self, splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Raises UserError also on tags that are not IOB."""
        _check_iob(splits)
        super().prepare(splits)

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Raises UserError also on tags that are not IOB."""
        for label in spec.labels:
            if label != spec.later_label:
                check_tag(label, "--model")
        _check_iob(splits)
        super().adopt(spec, splits)

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        from seqeval.metrics import f1_score

        gold, found = self.words(examples, rows, predictions)
        entities = float(f1_score(gold, found, zero_division=0))
        return {"entity_f1": entities, "accuracy": _accuracy(gold, found)}


def _check_iob(splits: Mapping[str, Sequence[Sentence]]) -> None:
    for sentence in chain(*splits.values()):
        for number, (before, tag) in enumerate(pairwise((BEGINNING, *sentence.tags))):
            where = sentence.where(number)
            check_tag(tag, where)
            check_order(before, tag, where)


def encode(
    tokenizer: Any,
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    limit: int,
    later: str | None = None,
) -> list[dict[str, Any]]:
    """Make model inputs with `labels`, the numbers of tags, and `first`, positions of first pieces.

    A label is the tag at the first piece of each word, `later` at its other pieces, and -100
    elsewhere and for what is not in `labels`. A word without a piece has position -1.
    """
    number: dict[str | None, int] = {label: index for index, label in enumerate(labels)}
    rows = []
    for sentence in sentences:
        ids, pieces = word_pieces(tokenizer, sentence.words, limit)
        numbers = [IGNORED] * len(ids)
        for run, tag in zip(pieces, sentence.tags, strict=True):
            for position in run:
                label = tag if position == run.start else later
                numbers[position] = number.get(label, IGNORED)
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": numbers,
                "first": first_of(pieces),
            }
        )
    return rows


def word_tags(
    sentences: Sequence[Sentence],
    rows: Sequence[dict[str, Any]],
    logits: Array,
    labels: Sequence[str],
    later: str | None = None,
) -> tuple[list[list[str]], list[list[str]]]:
    """Return gold and predicted tags of every word, by the logits [B, S, L] at its first piece.

    A word without a piece (cut off, or of blanks) has the prediction "O". A word whose first piece
    is taken for a `later` one goes on with the entity before it, as such pieces do in the
    evaluation of Mukherjee & Awadallah 2020 (remove_x in their conlleval.py): I-PER after B-PER or
    I-PER, "O" where there is none.
    """
    best = logits.argmax(-1)
    gold = [list(sentence.tags) for sentence in sentences]
    found = []
    for number, row in enumerate(rows):
        tags: list[str] = []
        for position in row["first"]:
            label = labels[best[number, position]] if position >= 0 else OUTSIDE
            tags.append(_going_on(tags) if label == later else label)
        found.append(tags)
    return gold, found


def _going_on(tags: Sequence[str]) -> str:
    """Return the tag of a word that belongs to the word before it."""
    before = tags[-1] if tags else OUTSIDE
    return f"{OTHER}{before[2:]}" if before.startswith((FIRST, OTHER)) else OUTSIDE


def _accuracy(gold: list[list[str]], found: list[list[str]]) -> float:
    return float(np.mean(np.array(list(chain(*gold))) == np.array(list(chain(*found)))))
