"""Classification: a label for a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification

from downstream.tables import Row, read_rows
from downstream.tasks import Task, label_head
from store import TaskSpec
from store.errors import UserError


@dataclass(frozen=True)
class Labelled:
    """A text, its one label, and where they stand."""

    text: str
    label: str
    where: str


class Classify(Task):
    """Columns `text` and `label`. The epoch is chosen by macro F1, which no class can outvote.

    `columns` gives a column's name where it is another. `per_class` trains on as many examples of
    each class, drawn anew by each seed.
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
        self, columns: Mapping[str, str] | None = None, per_class: int | None = None
    ) -> None:
        self.columns, self.per_class = columns or {}, per_class
        self.labels: list[str] = []

    def options(self) -> dict[str, Any]:
        return {"columns": dict(self.columns), "per_class": self.per_class}

    def read(self, path: Path) -> list[Labelled]:
        return [
            Labelled(row.text("text", self.columns), _label(row, self.columns), row.where)
            for row in read_rows(path)
        ]

    def prepare(self, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """The labels are those of `train`. Raises UserError where another split has more."""
        counts = Counter(example.label for example in splits["train"])
        self.labels = sorted(counts)
        if len(counts) < 2:
            raise UserError(
                f"--train: every label is {self.labels[0]!r}; a classifier needs two or more"
            )
        self._refuse_others(splits, "does not occur in training", "add examples of it")
        rarest = min(self.labels, key=lambda label: counts[label])
        if self.per_class and counts[rarest] < self.per_class:
            raise UserError(
                f"--per-class {self.per_class}: label {rarest!r} has {counts[rarest]} training "
                "examples; ask for at most as many"
            )

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """The labels are those of the model. Raises UserError where a split has others."""
        self.labels = list(spec.labels)
        self._refuse_others(splits, "is unknown to the model", "name it as the model does")

    def _refuse_others(
        self, splits: Mapping[str, Sequence[Labelled]], problem: str, remedy: str
    ) -> None:
        for example in (example for examples in splits.values() for example in examples):
            if example.label not in self.labels:
                raise UserError(
                    f"{example.where}: label {example.label!r} {problem}, which has"
                    f" {', '.join(self.labels)[:200]}; {remedy}, or take the row out"
                )

    def head(self) -> dict[str, Any]:
        return label_head(self.labels)

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
        texts = [example.text for example in examples]
        encoded = tokenizer(texts, truncation=True, max_length=limit)
        labels = [numbers[example.label] for example in examples]
        return as_rows({**encoded, "labels": labels})

    def score(
        self, examples: Sequence[Labelled], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Accuracy, macro and weighted F1, Matthews' correlation, as scikit-learn defines them."""
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        gold = [example.label for example in examples]
        found = [self.labels[number] for number in np.argmax(predictions, -1)]
        return {
            "accuracy": float(accuracy_score(gold, found)),
            "macro_f1": float(f1_score(gold, found, average="macro", zero_division=0)),
            "weighted_f1": float(f1_score(gold, found, average="weighted", zero_division=0)),
            "matthews": float(matthews_corrcoef(gold, found)),
        }


def as_rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Columns of equal length as rows."""
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _label(row: Row, columns: Mapping[str, str]) -> str:
    value = row.cell("label", columns)
    if isinstance(value, list | dict):
        raise UserError(
            f"{row.where}: {len(value)} labels {value!r:.60}; classify takes one label for a text: "
            "choose one, or make a file with a label of yes and no for each"
        )
    if value is None or not str(value).strip():
        raise UserError(f"{row.where}: the text has no label; give one or take the row out")
    return str(value).strip()
