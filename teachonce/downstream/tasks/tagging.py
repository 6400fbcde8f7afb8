"""The tasks pos and ner: assign a tag to every word of a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from teachonce.downstream.options import check_option
from teachonce.downstream.tasks.example_rows import read_rows
from teachonce.downstream.tasks.task_interface import IGNORED, LabelTask
from teachonce.downstream.tasks.word_windows import WORD_COLUMNS, joined, run_starts, word_windows
from teachonce.downstream.text_lines import check_unicode
from teachonce.store import TaskSpec
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.labelled_text import check_order, check_tag, labelled_row
from teachonce.teacher_dump.corpus.tables import cell_of, has_cell, is_table
from teachonce.teacher_dump.corpus.tag_schemes import (
    BEGINNING,
    FIRST,
    OTHER,
    OUTSIDE,
    converted,
    scheme_of,
    steps_of,
)
from teachonce.teacher_dump.corpus.tagged_files import tagged_layout, tagged_sentences
from teachonce.teacher_dump.corpus.text_files import suffix_of
from teachonce.training.label_measures import macro_entity_f1, macro_f1, matthews


@dataclass(frozen=True)
class Sentence:
    """Holds the words of a sentence, at least one, and a tag for each. `lines` are the numbers of
    the lines of `file` that have the words; () if they are unknown."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)

    def where(self, number: int) -> str:
        """Return the file and line of a word, for errors."""
        if not self.lines:
            return f"tags {self.file}, word {number + 1}"
        return f"tags {self.file}, line {self.lines[number]}"


TAG_COLUMNS = {
    "ner": ("ner_tags", "tags", "labels", "label", "entities", "spans", "annotations"),
    "pos": ("pos_tags", "upos", "tags", "labels", "label"),
}
"""Default names of the column of tags, by task; a table has one of them."""
TEXT_COLUMNS = (*WORD_COLUMNS, "text", "data.text")
"""Default names of the column of words, or of texts with labelled spans."""


def read_table(
    path: Path, columns: Mapping[str, str], tag_columns: Sequence[str]
) -> list[Sentence]:
    """Read a table of lists of words and tags, or of texts and spans, as teacher-dump does.

    columns: names of the columns of words (`text`) and tags (`label`), if not the default names.
    Raises UserError with file and row for a row without tags, for a word without a tag, and for a
    lone surrogate.
    """
    sentences = []
    for number, row in enumerate(read_rows(path), 1):
        words = columns.get("text") or next((n for n in TEXT_COLUMNS if has_cell(row, n)), "tokens")
        tags = columns.get("label") or next((n for n in tag_columns if has_cell(row, n)), "tags")
        row.cell("text", {"text": words})  # raises UserError if there is no such column
        row.cell("label", {"label": tags})
        example = labelled_row(row, [words], tags, number, row.where)
        every = example.gold.tags if example.gold else ()
        cell = cell_of(row, words)
        if cell in ([], "", None):
            continue
        if not every or (isinstance(cell, list) and len(cell) != len(every)):
            raise UserError(
                f"{row.where}: expected a tag for every word, got {cell_of(row, tags)!r:.60};"
                " correct the row or remove it"
            )
        check_unicode(example.text, row.where)
        texts = tuple(example.text[begin:end] for begin, end, _ in every)
        sentences.append(Sentence(texts, tuple(tag for *_, tag in every), row.where))
    if not sentences:
        raise UserError(f"{path}: has no words; name their column with --text-column")
    return sentences


def read_tagged(path: Path, parts_of_speech: bool = False) -> list[Sentence]:
    """Read words and tags, with a blank line after every sentence, as teacher-dump does.

    If there are several columns, parts of speech are in the second, tags of entities in the last.

    Raises UserError with file and line for any other line, and for a word without a tag (which
    teacher-dump accepts); also if the file is missing, empty or not UTF-8.
    """
    sentences = []
    try:
        for sentence in tagged_sentences(path, parts_of_speech=parts_of_speech):
            for line, word, tag in sentence:
                if not word.strip() or not tag:
                    raise UserError(
                        f"tags {path}, line {line}: expected word<TAB>tag, got {word[:60]!r} with "
                        f"tag {tag!r}; correct the line or remove it"
                    )
            lines, words, tags = zip(*sentence, strict=True)
            sentences.append(Sentence(words, tags, str(path), lines))
    except OSError as error:
        raise UserError(f"tags {path}: cannot be read: {error.strerror}; check the path") from None
    # A table of texts and labels has two columns as well, but spaces in most cells of the first.
    every = [word for sentence in sentences for word in sentence.words]
    texts = sum(" " in word for word in every)
    if texts > len(every) / 2:
        raise UserError(
            f"tags {path}: {texts} of {len(every)} words contain spaces, like whole texts; give"
            " word<TAB>tag lines with a blank line between sentences, or use --task classify for"
            " texts with labels"
        )
    if not sentences:
        raise UserError(f"tags {path}: has no sentence; give word<TAB>tag lines")
    return sentences


LATER = "X"
"""The label of a word's pieces after the first, as in the code of Mukherjee & Awadallah 2020
(sequence_process in preprocessing.py of microsoft/xtreme-distil-transformers)."""


class Tagging(LabelTask):
    """Tags the words of word<TAB>tag files and of tables.

    `later` is the label of a word's pieces after the first; if it is None, these pieces have no
    label and are not part of the loss. `labels` are the tags of words and `later`.
    """

    model_class = AutoModelForTokenClassification
    noun = "tag"
    later: str | None = None

    def __init__(
        self, unseen_labels: str = "refuse", columns: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(unseen_labels)
        self.columns = columns or {}

    def read(self, path: Path) -> list[Sentence]:
        """Read the sentences of a file of words and tags, or of a table.

        Raises UserError as `read_tagged` and `read_table` do.
        """
        # A .tsv or .csv holds lines of words and tags here, without names of columns.
        if is_table(path) and suffix_of(path) not in (".tsv", ".csv"):
            return read_table(path, self.columns, TAG_COLUMNS[self.name])
        if self.columns:
            options = " and ".join(f"--{name}-column" for name in self.columns)
            raise UserError(f"{path}: has no column names; leave {options} out")
        parts = self.name == "pos"
        sentences = read_tagged(path, parts)
        if note := tagged_layout(path, parts).note():
            self.note(f"{path}: {note}")
        return sentences

    def labels_of(self, example: Sentence) -> Sequence[str]:
        return example.tags

    def where(self, example: Sentence, number: int) -> str:
        return example.where(number)

    def gold_labels(self) -> list[str]:
        return [label for label in self.labels if label != self.later]

    def prepare(self, splits: Mapping[str, Sequence[Sentence]]) -> None:
        super().prepare(splits)
        if self.later is not None:
            # After the check of labels: `later` is not a tag that a file may have.
            self.labels.append(self.later)

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Sentence]]) -> None:
        self.later = spec.later_label
        super().adopt(spec, splits)

    def head(self) -> dict[str, Any]:
        """Return the head's config, with `later_label` (see `TaskSpec`)."""
        # also if it is None: the checkpoint's config may have a label
        return super().head() | {"later_label": self.later}

    def texts(self, examples: Sequence[Sentence]) -> list[str]:
        return [" ".join(sentence.words) for sentence in examples]

    def encode(
        self, tokenizer: Any, examples: Sequence[Sentence], limit: int
    ) -> list[dict[str, Any]]:
        """Make inputs with `labels` (numbers of tags) and `first` (positions of first pieces).

        The first piece of a word has the number of its tag, its other pieces the number of the
        label `self.later`. Other tokens, and tags not in `labels`, have -100. A word without a
        piece has position -1. A sentence of more than `limit` tokens gives several inputs, and each
        of its words has label and position in one of them; `example` is the number of the sentence.
        """
        number: dict[str | None, int] = {label: n for n, label in enumerate(self.labels)}
        rows = []
        for example, sentence in enumerate(examples):
            for window in word_windows(tokenizer, *joined(sentence.words), limit):
                numbers, runs = [IGNORED] * len(window.ids), list[range]()
                for word, run in window.own_pieces():
                    runs.append(run)
                    for position in run:
                        label = sentence.tags[word] if position == run.start else self.later
                        numbers[position] = number.get(label, IGNORED)
                row = {"input_ids": window.ids, "attention_mask": [1] * len(window.ids)}
                rows.append(
                    {**row, "labels": numbers, "first": run_starts(runs), "example": example}
                )
        several = [
            number for number, count in Counter(r["example"] for r in rows).items() if count > 1
        ]
        if several:
            self.note(
                f"{counted(len(several), 'sentence')} of {len(examples):,} have more than {limit}"
                " tokens: split into overlapping windows, each word is scored once"
            )
        return rows

    def tags_of_words(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Return the gold and the predicted tags of all words of each sentence.

        predictions: logits [B, S, L]. The prediction of a word is the best label at its first
        piece; "O" for a word without a piece (only white space). If it is `self.later`, the label
        of later pieces, the word continues the entity before it: I-PER after B-PER or I-PER, "O"
        without an entity. So does the evaluation of Mukherjee & Awadallah 2020 (remove_x in their
        conlleval.py).
        """
        best = predictions.argmax(-1)
        gold = [list(sentence.tags) for sentence in examples]
        predicted: list[list[str]] = [[] for _ in examples]
        for number, row in enumerate(rows):
            tags = predicted[row["example"]]
            for position in row["first"]:
                label = self.labels[best[number, position]] if position >= 0 else OUTSIDE
                tags.append(continued(tags) if label == self.later else label)
        return gold, predicted

    def predicted(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> list[str]:
        return list(chain(*self.tags_of_words(examples, rows, predictions)[1]))

    def collator(self, tokenizer: Any) -> Any:
        return DataCollatorForTokenClassification(tokenizer)


class PartsOfSpeech(Tagging):
    """Assigns tags of any kind. The best epoch has the highest macro F1 over the split's tags."""

    name = "pos"
    measures = {"macro F1": "macro_f1", "accuracy": "accuracy", "Matthews": "matthews"}
    primary = "macro_f1"

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        gold, predicted = self.tags_of_words(examples, rows, predictions)
        flat, guessed = list(chain(*gold)), list(chain(*predicted))
        return {
            "macro_f1": macro_f1(flat, guessed),
            "accuracy": _accuracy(gold, predicted),
            "matthews": matthews(flat, guessed),
        }


class Entities(Tagging):
    """Assigns IOB tags. The best epoch has the highest F1 over whole entities, by seqeval.

    pieces: "first" labels only the first piece of a word; "all" labels its other pieces `LATER`. If
        a model is scored without training, its config determines this.
    """

    name = "ner"
    measures = {"entity F1": "entity_f1", "macro F1": "macro_f1", "accuracy": "accuracy"}
    primary = "entity_f1"

    def __init__(
        self,
        unseen_labels: str = "refuse",
        pieces: str = "first",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(unseen_labels, columns)
        check_option("pieces", pieces)
        self.later = LATER if pieces == "all" else None

    def options(self) -> dict[str, Any]:
        return {**super().options(), "pieces": "first" if self.later is None else "all"}

    def read(self, path: Path) -> list[Sentence]:
        """Read sentences and convert tags of another scheme to IOB2. Raises as `Tagging.read`."""
        sentences = super().read(path)
        tags = [sentence.tags for sentence in sentences]
        scheme = scheme_of(chain(*tags), steps_of(tags))
        if scheme in (None, "IOB2"):
            return sentences
        self.note(f"{path}: tags are {scheme}; they are converted to IOB2")
        return [replace(s, tags=tuple(converted(s.tags, "IOB2"))) for s in sentences]

    def prepare(self, splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Take the labels of `train`; see `LabelTask.prepare`. Raises UserError also for tags that
        are not IOB."""
        _check_iob(splits)
        super().prepare(splits)

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Sentence]]) -> None:
        """Take the labels of the model; see `LabelTask.adopt`. Raises UserError also for tags that
        are not IOB."""
        for label in spec.labels:
            if label != spec.later_label:
                check_tag(label, "--model")
        _check_iob(splits)
        super().adopt(spec, splits)

    def uncomputable(self, gold: Set[Any]) -> str:
        return "entity F1 and macro F1" if gold == {OUTSIDE} else ""

    def score(
        self, examples: Sequence[Sentence], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute the F1 over all entities, the mean F1 over the entity types in the gold tags, and
        the accuracy of tags."""
        from seqeval.metrics import f1_score

        gold, predicted = self.tags_of_words(examples, rows, predictions)
        return {
            "entity_f1": float(f1_score(gold, predicted, zero_division=0)),
            "macro_f1": macro_entity_f1(gold, predicted),
            "accuracy": _accuracy(gold, predicted),
        }


def _check_iob(splits: Mapping[str, Sequence[Sentence]]) -> None:
    for sentence in chain(*splits.values()):
        for number, (before, tag) in enumerate(pairwise((BEGINNING, *sentence.tags))):
            where = sentence.where(number)
            check_tag(tag, where)
            check_order(before, tag, where)


def continued(tags: Sequence[str]) -> str:
    """Return the tag that continues the entity of the last tag: I-X after B-X or I-X, else "O"."""
    before = tags[-1] if tags else OUTSIDE
    return f"{OTHER}{before[2:]}" if before.startswith((FIRST, OTHER)) else OUTSIDE


def _accuracy(gold: list[list[str]], predicted: list[list[str]]) -> float:
    return float(np.mean(np.array(list(chain(*gold))) == np.array(list(chain(*predicted)))))
