"""Tagging: a tag for every word of a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from downstream.tasks import IGNORED, LabelTask
from downstream.words import Sentence, first_pieces, read_tagged
from teacher_dump.iob import BEGINNING, check_order, check_tag


class Tagging(LabelTask):
    """word<TAB>tag files."""

    model_class = AutoModelForTokenClassification
    what = "tag"

    def read(self, path: Path) -> list[Sentence]:
        return read_tagged(path)

    def labels_of(self, example: Sentence) -> Sequence[str]:
        return example.tags

    def where(self, example: Sentence, number: int) -> str:
        return example.where(number)

    def encode(
        self, tokenizer: Any, examples: Sequence[Sentence], limit: int
    ) -> list[dict[str, Any]]:
        return encode(tokenizer, examples, self.labels, limit)

    def collator(self, tokenizer: Any) -> Any:
        return DataCollatorForTokenClassification(tokenizer)


class PartsOfSpeech(Tagging):
    """The epoch is chosen by macro F1, over the tags that occur in the split."""

    name = "pos"
    measures = {"macro F1": "macro_f1", "accuracy": "accuracy"}
    primary = "macro_f1"

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        from sklearn.metrics import f1_score

        gold, found = word_tags(examples, rows, predictions, self.labels)
        flat, guessed = list(chain(*gold)), list(chain(*found))
        macro = f1_score(flat, guessed, labels=sorted(set(flat)), average="macro", zero_division=0)
        return {"macro_f1": float(macro), "accuracy": _accuracy(gold, found)}


class Entities(Tagging):
    """IOB tags. The epoch is chosen by F1 over whole entities, as seqeval counts them."""

    name = "ner"
    measures = {"entity F1": "entity_f1", "accuracy": "accuracy"}
    primary = "entity_f1"

    def prepare(self, splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Raises UserError on tags that are not IOB, as well."""
        _check_iob(splits)
        super().prepare(splits)

    def adopt(self, labels: Sequence[str], splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Raises UserError on tags that are not IOB, as well."""
        for label in labels:
            check_tag(label, "--model")
        _check_iob(splits)
        super().adopt(labels, splits)

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        from seqeval.metrics import f1_score

        gold, found = word_tags(examples, rows, predictions, self.labels)
        entities = float(f1_score(gold, found, zero_division=0))
        return {"entity_f1": entities, "accuracy": _accuracy(gold, found)}


def _check_iob(splits: Mapping[str, Sequence[Sentence]]) -> None:
    for sentence in chain(*splits.values()):
        for number, (before, tag) in enumerate(pairwise((BEGINNING, *sentence.tags))):
            where = sentence.where(number)
            check_tag(tag, where)
            check_order(before, tag, where)


def encode(
    tokenizer: Any, sentences: Sequence[Sentence], tags: Sequence[str], limit: int
) -> list[dict[str, Any]]:
    """Model inputs with `labels`: the tag at the first piece of each word, -100 elsewhere.

    A tag that is not in `tags` is labelled -100 as well. `first` is where the first piece of each
    word stands, -1 for a word without a piece.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    rows = []
    for sentence in sentences:
        ids, first = first_pieces(tokenizer, sentence.words, limit)
        labels = [IGNORED] * len(ids)
        for position, tag in zip(first, sentence.tags, strict=True):
            if position >= 0:
                labels[position] = number.get(tag, IGNORED)
        rows.append(
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels, "first": first}
        )
    return rows


def word_tags(
    sentences: Sequence[Sentence],
    rows: Sequence[dict[str, Any]],
    logits: np.ndarray[Any, Any],
    tags: Sequence[str],
) -> tuple[list[list[str]], list[list[str]]]:
    """Gold and predicted tags of every word. A word without a piece (cut off, or of blanks) has the
    prediction "O"."""
    best = logits.argmax(-1)
    gold = [list(sentence.tags) for sentence in sentences]
    found = [
        [tags[best[number, position]] if position >= 0 else "O" for position in row["first"]]
        for number, row in enumerate(rows)
    ]
    return gold, found


def _accuracy(gold: list[list[str]], found: list[list[str]]) -> float:
    return float(np.mean(np.array(list(chain(*gold))) == np.array(list(chain(*found)))))
