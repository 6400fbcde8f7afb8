"""The task classify: gives a text, or the two of a pair, one of several labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification

from teachonce.downstream.options import check
from teachonce.downstream.tasks.example_rows import Row, read_rows, text_roles
from teachonce.downstream.tasks.task_interface import IGNORED, LabelTask, input_rows
from teachonce.store import TaskSpec
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.annotations import annotation_of, check_accepted
from teachonce.teacher_dump.corpus.labelled_text import several_labels


@dataclass(frozen=True)
class Labelled:
    """A text or the two of a pair, their one label, and where they stand."""

    texts: tuple[str, ...]
    label: str
    where: str


class Classify(LabelTask):
    """Classifies tables of `text` and `label`, or of `text_a`, `text_b` and `label`, as are
    paraphrases, entailment and yes/no questions of a passage. Both texts of a pair are one input.
    The epoch is chosen by macro F1, in which all classes weigh the same. If there are
    two classes, `F1` is that of the last one in alphabetical order: of 1 (not 0), yes (not no).

    Rows are pairs where `columns` names one of their columns, or where they have one and no `text`.

    columns: names of columns that differ from what they hold, by what they hold.
    per_class: number of training examples of each class, drawn anew for each seed; None for all.
    unseen_labels: see `LabelTask`.
    """

    name = "classify"
    model_class = AutoModelForSequenceClassification
    measures = {
        "accuracy": "accuracy",
        "macro F1": "macro_f1",
        "weighted F1": "weighted_f1",
        "Matthews": "matthews",
    }
    primary = "macro_f1"

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        per_class: int | None = None,
        unseen_labels: str = "refuse",
    ) -> None:
        super().__init__(unseen_labels)
        check("per_class", per_class)
        self.columns, self.per_class = columns or {}, per_class

    def options(self) -> dict[str, Any]:
        return {"columns": dict(self.columns), "per_class": self.per_class, **super().options()}

    def read(self, path: Path) -> list[Labelled]:
        return [
            Labelled(
                tuple(row.text(role, self.columns) for role in text_roles(row, self.columns)),
                _label(row, self.columns),
                row.where,
            )
            for row in read_rows(path)
        ]

    def labels_of(self, example: Labelled) -> Sequence[str]:
        return (example.label,)

    def where(self, example: Labelled, number: int) -> str:
        return example.where

    def prepare(self, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """Raises UserError also where there is one label alone, or too few examples `per_class`,
        or where some examples are texts and others pairs."""
        _check_alike(splits)
        counts = Counter(example.label for example in splits["train"])
        if len(counts) < 2:
            (label,) = counts
            raise UserError(f"--train: every label is {label!r}; a classifier needs two or more")
        super().prepare(splits)
        rarest = min(self.labels, key=lambda label: counts[label])
        if self.per_class and counts[rarest] < self.per_class:
            raise UserError(
                f"--per-class {self.per_class}: label {rarest!r} has {counts[rarest]} training "
                "examples; ask for at most as many"
            )
        self._measure_the_last_of_two()

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """Raises UserError also where some examples are texts and others pairs, and for a model
        whose outputs are not those of one label of all."""
        if spec.output_kind != "one label":
            given = {"numbers": "numbers (regression)"}.get(spec.output_kind, spec.output_kind)
            raise UserError(
                f"--model: its head gives a text {given} (problem_type {spec.problem_type} in its"
                " config.json), and --task classify scores one label a text; give a model of one"
                " label, or fine-tune it (leave --as-is out)"
            )
        _check_alike(splits)
        super().adopt(spec, splits)
        self._measure_the_last_of_two()

    def _measure_the_last_of_two(self) -> None:
        if len(self.labels) == 2:
            self.measures = {**self.measures, "F1": "f1"}

    def sample(self, train: Sequence[Labelled], seed: int) -> Sequence[Labelled]:
        if self.per_class is None:
            return train
        draws, chosen = np.random.default_rng(seed), []
        for label in self.labels:
            places = [place for place, example in enumerate(train) if example.label == label]
            chosen += draws.choice(places, self.per_class, replace=False).tolist()
        return [train[place] for place in sorted(chosen)]

    def encode(
        self, tokenizer: Any, examples: Sequence[Labelled], limit: int
    ) -> list[dict[str, Any]]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        labels = [numbers.get(example.label, IGNORED) for example in examples]
        return input_rows(self, tokenizer, [e.texts for e in examples], labels, limit)

    def score(
        self, examples: Sequence[Labelled], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute accuracy, macro and weighted F1 and Matthews' correlation with scikit-learn; for
        two classes also the F1 of the last."""
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        gold = [example.label for example in examples]
        found = [self.labels[number] for number in np.argmax(predictions, -1)]
        scores = {
            "accuracy": float(accuracy_score(gold, found)),
            "macro_f1": float(f1_score(gold, found, average="macro", zero_division=0)),
            "weighted_f1": float(f1_score(gold, found, average="weighted", zero_division=0)),
            "matthews": float(matthews_corrcoef(gold, found)),
        }
        if "F1" in self.measures:
            last = [max(self.labels)]
            scores["f1"] = float(
                f1_score(gold, found, labels=last, average="macro", zero_division=0)
            )
        return scores


def _check_alike(splits: Mapping[str, Sequence[Labelled]]) -> None:
    """UserError where some examples are one text and others two."""
    examples = [example for some in splits.values() for example in some]
    first = examples[0]
    for example in examples:
        if len(example.texts) != len(first.texts):
            kind, other = ("a text", "a pair")[:: 1 if len(example.texts) == 1 else -1]
            raise UserError(
                f"{example.where}: is {kind}, but {first.where} is {other}; give texts alone"
                " (column text) or pairs alone (columns text_a and text_b)"
            )


def _label(row: Row, columns: Mapping[str, str]) -> str:
    check_accepted(row, row.where)
    found = annotation_of(row.cell("label", columns), columns.get("label", "label"), row.where)
    labels = found.labels if found else ()
    if len(labels) > 1 or (found and found.spans):
        raise several_labels(labels or (found.spans if found else ()), row.where)
    if not labels or not labels[0].strip():
        raise UserError(f"{row.where}: the text has no label; give one or take the row out")
    return labels[0].strip()
