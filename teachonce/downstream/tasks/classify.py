"""The task classify: assigns one of several labels to a text or a pair of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification

from teachonce.checkpoints.labels import PAIRS, trained_on_pairs
from teachonce.checkpoints.names import ResolvedModel
from teachonce.downstream.options import check_option
from teachonce.downstream.tasks.example_rows import PAIR, Row, read_rows, text_roles
from teachonce.downstream.tasks.task_interface import IGNORED, LabelTask, input_rows
from teachonce.store import TaskSpec
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.annotations import annotation_of, check_accepted
from teachonce.teacher_dump.corpus.labelled_text import several_labels
from teachonce.training.label_measures import macro_f1, matthews


@dataclass(frozen=True)
class Labelled:
    """Holds a text or a pair of texts, its label, and its file and line for errors."""

    texts: tuple[str, ...]
    label: str
    where: str


class Classify(LabelTask):
    """Classifies the rows of tables: texts, or pairs such as paraphrases and entailment.

    Columns are `text` and `label`, or `text_a`, `text_b` and `label`. The two texts of a pair are
    one input. A row is a pair if `columns` names a column of pairs, or if it has such a column and
    no `text`. The best epoch has the highest macro F1, which weighs all classes equally.
    With two classes, `F1` is the F1 of the class that is last in alphabetical order: 1 (not 0), yes
    (not no).

    columns: names of columns by role (`text`, `label`, ...), if they differ from the role.
    per_class: number of training examples per class, drawn again for each seed; None for all.
    unseen_labels: see `LabelTask`.

    `pairs`: whether the model was trained on pairs; None if the config of a model that is scored
        without training does not record it.
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
        check_option("per_class", per_class)
        self.columns, self.per_class = columns or {}, per_class
        self.pairs: bool | None = None

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

    def load_own(self, model: ResolvedModel) -> tuple[Any, Any, TaskSpec]:
        tokenizer, network, spec = super().load_own(model)
        self.pairs = trained_on_pairs(network.config)
        return tokenizer, network, spec

    def labels_of(self, example: Labelled) -> Sequence[str]:
        return (example.label,)

    def where(self, example: Labelled, number: int) -> str:
        return example.where

    def prepare(self, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """Take the labels from `train`; see `Task.prepare`.

        Raises UserError also for a single label, for fewer examples than `per_class`, and if texts
        and pairs are mixed.
        """
        self.pairs = _of_pairs(splits)
        counts = Counter(example.label for example in splits["train"])
        if len(counts) < 2:
            (label,), first = counts, splits["train"][0].where
            raise UserError(
                f"--train: every label is {label!r} (from {first} on); a classifier needs two or"
                " more: add texts of another label, or raise --limit if it leaves them out"
            )
        super().prepare(splits)
        rarest = min(self.labels, key=lambda label: counts[label])
        if self.per_class and counts[rarest] < self.per_class:
            raise UserError(
                f"--per-class {self.per_class}: label {rarest!r} has {counts[rarest]} training "
                "examples; give at most this number"
            )
        self._measure_the_last_of_two()

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Labelled]]) -> None:
        """Take the labels from the head of a trained classifier; see `Task.adopt`.

        Raises UserError also if the head is not a single-label classifier, if texts and pairs are
        mixed, and for texts if the model was trained on pairs, or pairs if it was trained on texts.
        """
        if spec.output_kind != "one label":
            output = {"numbers": "numbers (regression)"}.get(spec.output_kind, spec.output_kind)
            raise UserError(
                f"--model: its head predicts {output} for each text (problem_type"
                f" {spec.problem_type} in its config.json), and --task classify scores one label;"
                " give a single-label model, or fine-tune this one (leave --as-is out)"
            )
        pairs, first = _of_pairs(splits), next(examples[0] for examples in splits.values())
        if self.pairs not in (None, pairs):
            raise UserError(
                f"{first.where}: is a text, and the model was trained on pairs; name the columns of"
                " both texts with --text-a-column and --text-b-column"
                if self.pairs
                else f"{first.where}: is a pair, and the model was trained on single texts; give"
                " texts in column text"
            )
        super().adopt(spec, splits)
        self._measure_the_last_of_two()

    def _measure_the_last_of_two(self) -> None:
        if len(self.labels) == 2:
            self.measures = {**self.measures, "F1": "f1"}

    def sample(self, train: Sequence[Labelled], seed: int) -> Sequence[Labelled]:
        if self.per_class is None:
            return train
        draws, indices = np.random.default_rng(seed), []
        for label in self.labels:
            members = [index for index, example in enumerate(train) if example.label == label]
            indices += draws.choice(members, self.per_class, replace=False).tolist()
        return [train[index] for index in sorted(indices)]

    def finish(self, network: Any) -> str:
        network.config.update({PAIRS: self.pairs})
        return super().finish(network)

    def texts(self, examples: Sequence[Labelled]) -> list[str]:
        return [text for example in examples for text in example.texts]

    def encode(
        self, tokenizer: Any, examples: Sequence[Labelled], limit: int
    ) -> list[dict[str, Any]]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        # A label that `unseen_labels` counts as an error has no number, and is ignored by the loss.
        labels = [numbers.get(example.label, IGNORED) for example in examples]
        return input_rows(self, tokenizer, [e.texts for e in examples], labels, limit)

    def predicted(
        self, examples: Sequence[Labelled], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> list[str]:
        return [self.labels[number] for number in np.argmax(predictions, -1)]

    def score(
        self, examples: Sequence[Labelled], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute accuracy, macro and weighted F1 and Matthews' correlation with scikit-learn; for
        two classes also the F1 of the last class."""
        from sklearn.metrics import accuracy_score, f1_score

        gold, predicted = self.gold(examples), self.predicted(examples, rows, predictions)
        scores = {
            "accuracy": float(accuracy_score(gold, predicted)),
            "macro_f1": macro_f1(gold, predicted),
            "weighted_f1": float(f1_score(gold, predicted, average="weighted", zero_division=0)),
            "matthews": matthews(gold, predicted),
        }
        if "F1" in self.measures:
            # `average="binary"` refuses a third label, which --unseen-labels count admits.
            last = [max(self.labels)]
            scores["f1"] = float(
                f1_score(gold, predicted, labels=last, average="macro", zero_division=0)
            )
        return scores


def _of_pairs(splits: Mapping[str, Sequence[Labelled]]) -> bool:
    """Return whether the examples are pairs. Raises UserError if texts and pairs are mixed."""
    examples = [example for split in splits.values() for example in split]
    first = examples[0]
    for example in examples:
        if len(example.texts) != len(first.texts):
            kind, other = ("a text", "a pair")[:: 1 if len(example.texts) == 1 else -1]
            raise UserError(
                f"{example.where}: is {kind}, but {first.where} is {other}; give only texts"
                " (column text) or only pairs (columns text_a and text_b)"
            )
    return len(first.texts) == len(PAIR)


def _label(row: Row, columns: Mapping[str, str]) -> str:
    check_accepted(row, row.where)
    annotation = annotation_of(row.cell("label", columns), columns.get("label", "label"), row.where)
    labels = annotation.labels if annotation else ()
    if len(labels) > 1 or (annotation and annotation.spans):
        raise several_labels(labels or (annotation.spans if annotation else ()), row.where)
    if not labels:
        raise UserError(f"{row.where}: the text has no label; give it one, or remove the row")
    return labels[0]
