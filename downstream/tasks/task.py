"""What is different between the tasks that a checkpoint is fine-tuned and scored for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import DataCollatorWithPadding

from downstream.options import check
from store import TaskSpec
from support.errors import UserError

IGNORED = -100
"""The label that the losses of transformers leave out."""


class Task(ABC):
    """Files, head, rows and measures of a task. `downstream.finetune` does the rest.

    In order: `read` each file, `prepare` with all of them, then for each seed `sample`, `encode`,
    train, `score`. A model that has its head is scored as it is: `read`, `adopt`, `encode`,
    `score`.
    """

    name: str
    model_class: Any
    """An AutoModelFor... of transformers."""
    measures: Mapping[str, str]
    """What each figure of a score is called, and its key. All are better when larger, 1 at best."""
    primary: str
    """The key of the measure that chooses the epoch."""
    max_length: ClassVar[int] = 128

    def options(self) -> dict[str, Any]:
        """What of a run's settings belongs to the task alone, for the record."""
        return {}

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """The examples of a file, at least one. Raises UserError with file and line."""

    @abstractmethod
    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """Learn from `train` what the head needs. Raises UserError where splits do not fit."""

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """Learn from the head of a model, whose outputs `spec` names, what `prepare` learns
        from `train`. Raises UserError where head and splits do not fit; here always."""
        raise UserError(f"--task {self.name}: its models cannot be scored as they are; fine-tune")

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """What the model's config is told: the number of outputs, the names of labels."""

    def sample(self, train: Sequence[Any], seed: int) -> Sequence[Any]:
        """The training examples of one seed: all."""
        return train

    @abstractmethod
    def encode(self, tokenizer: Any, examples: Sequence[Any], limit: int) -> list[dict[str, Any]]:
        """Model inputs of at most `limit` tokens, with labels and whatever `score` needs; an
        example may become several rows."""

    @abstractmethod
    def score(
        self, examples: Sequence[Any], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """A figure for each of `measures`. `predictions` is what the Trainer predicts for rows."""

    def collator(self, tokenizer: Any) -> Any:
        """What makes batches of rows."""
        return DataCollatorWithPadding(tokenizer)


class LabelTask(Task):
    """A task whose outputs are labels, of a text or of its words.

    A label that training does not have, or of a model as it is the head, cannot be predicted. With
    `unseen_labels` "refuse" it is refused, with "count" every one is a wrong prediction.
    """

    what = "label"

    def __init__(self, unseen_labels: str = "refuse") -> None:
        check("unseen_labels", unseen_labels)
        self.unseen_labels = unseen_labels
        self.labels: list[str] = []

    def options(self) -> dict[str, Any]:
        return {"unseen_labels": self.unseen_labels}

    @abstractmethod
    def labels_of(self, example: Any) -> Sequence[str]:
        """The gold labels of an example."""

    @abstractmethod
    def where(self, example: Any, number: int) -> str:
        """The place of one of them, for errors."""

    def known(self) -> Sequence[str]:
        """Of `labels` those that an example may have."""
        return self.labels

    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """The labels are those of `train`. Raises UserError where another split has more."""
        known = {label for example in splits["train"] for label in self.labels_of(example)}
        self.labels = sorted(known)
        self._check(splits, "does not occur in training", "train on examples of it")

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """The labels are those of the model. Raises UserError where a split has others."""
        self.labels = list(spec.labels)
        self._check(splits, "is unknown to the model", "name it as the model does")

    def _check(self, splits: Mapping[str, Collection[Any]], problem: str, remedy: str) -> None:
        if self.unseen_labels == "count":
            return
        known = self.known()
        for example in (example for examples in splits.values() for example in examples):
            for number, label in enumerate(self.labels_of(example)):
                if label not in known:
                    raise UserError(
                        f"{self.where(example, number)}: {self.what} {label!r} {problem}, which has"
                        f" {', '.join(known)[:200]}; {remedy}, take it out, or score it as an"
                        " error with --unseen-labels count"
                    )

    def head(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: number for number, label in enumerate(self.labels)},
        }
