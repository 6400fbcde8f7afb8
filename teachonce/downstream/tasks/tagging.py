"""The tasks pos and ner: give every word of a sentence a tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from teachonce.downstream.options import check
from teachonce.downstream.tasks.task_interface import IGNORED, LabelTask
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.files import tagged_sentences
from teachonce.teacher_dump.corpus.labelled_text import (
    BEGINNING,
    FIRST,
    OTHER,
    OUTSIDE,
    check_order,
    check_tag,
)


@dataclass(frozen=True)
class Sentence:
    """Words and their tags, equally many and at least one; `lines` of `file` hold them."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)

    def where(self, number: int) -> str:
        """Tell where the word of this number stands, for errors."""
        line = self.lines[number] if self.lines else number + 1
        return f"tags {self.file}, line {line}"


def read_tagged(path: Path) -> list[Sentence]:
    """Read `word<TAB>tag` lines with a blank line between sentences, as teacher-dump does.

    Raises UserError with the line's number for any other line, and for a word without a tag, which
    teacher-dump takes; also where the file is missing, empty or not UTF-8.
    """
    sentences = []
    try:
        for sentence in tagged_sentences(path):
            for line, word, tag in sentence:
                if not word.strip() or not tag:
                    raise UserError(
                        f"tags {path}, line {line}: expected word<TAB>tag, got {word[:60]!r} with "
                        f"tag {tag!r}; mend the line or take it out"
                    )
            lines, words, tags = zip(*sentence, strict=True)
            sentences.append(Sentence(words, tags, str(path), lines))
    except OSError as error:
        raise UserError(f"tags {path}: cannot be read: {error.strerror}; check the path") from None
    every = [word for sentence in sentences for word in sentence.words]
    texts = sum(" " in word for word in every)
    if texts > len(every) / 2:
        raise UserError(
            f"tags {path}: {texts} of {len(every)} words have blanks in them, as whole texts have;"
            " give word<TAB>tag lines with a blank line between sentences, or for texts with labels"
            " --task classify"
        )
    if not sentences:
        raise UserError(f"tags {path}: has no sentence; give word<TAB>tag lines")
    return sentences


def first_of(pieces: Sequence[range]) -> list[int]:
    """Return where each run begins, -1 for an empty one."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int
) -> tuple[list[int], list[range]]:
    """Return token ids of the words joined by blanks, and the positions of each word's pieces.

    Positions come from character offsets, not from `is_split_into_words`, because byte-level
    tokenizers treat words given apart as if no blank preceded them.
    """
    encoded = tokenizer(
        " ".join(words),
        truncation=True,
        max_length=max_length,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    spans, special = encoded["offset_mapping"], encoded["special_tokens_mask"]
    pieces, position, begin = [], 0, 0
    for word in words:
        end = begin + len(word)
        while position < len(spans) and (special[position] or spans[position][1] <= begin):
            position += 1
        stop = position
        while stop < len(spans) and not special[stop] and spans[stop][0] < end:
            stop += 1
        pieces.append(range(position, stop))
        begin = end + 1
    return encoded["input_ids"], pieces


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
