"""What a task that a checkpoint is fine-tuned and scored for must say: class `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import DataCollatorWithPadding

from teachonce.checkpoints.loading import load_with_fresh_head, load_with_own_head
from teachonce.checkpoints.names import ResolvedModel
from teachonce.downstream.options import check
from teachonce.store import TaskSpec
from teachonce.support.console import counted
from teachonce.support.errors import UserError, suggest
from teachonce.teacher_dump.corpus.tag_schemes import NO_LABEL

IGNORED = -100
"""The label that the losses of transformers leave out."""


class Task(ABC):
    """Reads the files of a task, makes inputs of examples and scores predictions.

    `fine_tune` calls `read` for each file, `prepare` with all of them, and for each seed
    `load_fresh`, `sample`, `encode` and, after training, `score`. `score_as_is`, for a model that
    has its head, calls `read`, `predict_own`, `load_own`, `adopt`, `encode` and `score`.
    """

    name: str
    model_class: Any
    """An AutoModelFor... of transformers."""
    measures: Mapping[str, str]
    """Keys of the figures of a score, by what to call them. Larger is better, 1 the best."""
    primary: str
    """Key of the measure that chooses the epoch."""
    max_length: ClassVar[int] = 128

    def note(self, line: str) -> None:
        """Add a line to what `take_notes` returns."""
        self.__dict__.setdefault("_notes", []).append(line)

    def take_notes(self) -> list[str]:
        """Return, once, the lines on how `read` and `encode` took what they were given."""
        notes: list[str] = self.__dict__.pop("_notes", [])
        return notes

    def options(self) -> dict[str, Any]:
        """Return the settings that belong to the task alone, for scores.json."""
        return {}

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """Read the examples of a file, at least one. Raises UserError with file and line."""

    @abstractmethod
    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """Learn from `train` what the head needs. Raises UserError where splits do not fit."""

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """Learn from the head of a model, whose outputs `spec` names.

        Raises UserError where head and splits do not fit; of a task without this method, always.
        """
        raise UserError(f"--task {self.name}: its models cannot be scored as they are; fine-tune")

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return what the model's config must say: number of outputs, names of labels."""

    def load_fresh(self, model: ResolvedModel) -> tuple[Any, Any]:
        """Load tokenizer and network with a new head. Raises as `load_with_fresh_head` does."""
        return load_with_fresh_head(model, self.model_class, self.head())

    def load_own(self, model: ResolvedModel) -> tuple[Any, Any, TaskSpec]:
        """Load tokenizer, network and its outputs. Raises as `load_with_own_head` does."""
        return load_with_own_head(model, self.model_class)

    def predict_own(
        self, model: str, splits: Mapping[str, Sequence[Any]], max_length: int | None
    ) -> Mapping[str, Any] | None:
        """Predict the examples of each split by what the model's folder itself says of the task.

        None, as by default, where it says nothing: then `load_own` loads its head.
        """
        return None

    def sample(self, train: Sequence[Any], seed: int) -> Sequence[Any]:
        """Choose the training examples of one seed, by default all."""
        return train

    @abstractmethod
    def encode(self, tokenizer: Any, examples: Sequence[Any], limit: int) -> list[dict[str, Any]]:
        """Make model inputs of at most `limit` tokens, with labels and whatever `score` needs.

        An example may become several rows.
        """

    @abstractmethod
    def score(
        self, examples: Sequence[Any], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute each of `measures` from what the Trainer predicts for the rows."""

    def collator(self, tokenizer: Any) -> Any:
        """Return the collator that makes batches of rows."""
        return DataCollatorWithPadding(tokenizer)


class LabelTask(Task):
    """A task whose outputs are labels, of a text or of its words.

    unseen_labels: what to do with a label that the model cannot predict, because training (or the
    head of a model that is scored as it is) does not have it. "refuse" raises UserError, "count"
    takes it for a wrong prediction.
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
        """Return the gold labels of an example."""

    @abstractmethod
    def where(self, example: Any, number: int) -> str:
        """Tell where the gold label of this number stands, for errors."""

    def known(self) -> Sequence[str]:
        """Return those of `labels` that an example may have."""
        return self.labels

    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """Take the labels of `train`. Raises UserError where another split has more, and for
        numbers that mean no label."""
        known = {label for example in splits["train"] for label in self.labels_of(example)}
        self.labels = sorted(known)
        self._check_numbers(splits)
        self._check(splits, "does not occur in training", "train on examples of it")

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """Take the labels of the model. Raises UserError where a split has others."""
        self.labels = list(spec.labels)
        self._check(splits, "is unknown to the model", "name it as the model does")

    def _check_numbers(self, splits: Mapping[str, Sequence[Any]]) -> None:
        counted = not {"0", "0.0"}.isdisjoint(self.labels)  # pandas writes 0.0 where some lack
        none = {str(IGNORED), *([NO_LABEL] if counted else [])}
        for example in (example for examples in splits.values() for example in examples):
            for number, label in enumerate(self.labels_of(example)):
                if label.removesuffix(".0") in none:
                    raise UserError(
                        f"{self.where(example, number)}: {self.what} {label} means no label, where"
                        " labels are numbers; take it out, or give the class a name"
                    )

    def _check(self, splits: Mapping[str, Collection[Any]], problem: str, remedy: str) -> None:
        if self.unseen_labels == "count":
            return
        known = self.known()
        for example in (example for examples in splits.values() for example in examples):
            for number, label in enumerate(self.labels_of(example)):
                if label not in known:
                    raise UserError(
                        f"{self.where(example, number)}: {self.what} {label!r} {problem}, which has"
                        f" {', '.join(known)[:200]}; {suggest(label, known)}{remedy}, take it out,"
                        " or score it as an error with --unseen-labels count"
                    )

    def head(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: number for number, label in enumerate(self.labels)},
            "problem_type": None,  # the checkpoint's may be of other outputs
        }


def encode_cut(task: Task, tokenizer: Any, texts: Sequence[Sequence[str]], limit: int) -> Any:
    """Encode texts, or pairs of them, of which none is longer than `limit` tokens after it was cut.
    A note of `task` says how many were cut.

    texts: the first text of each example, and for pairs also the second one of each.
    """
    encoded = tokenizer(*map(list, texts), truncation=True, max_length=limit)
    cut = sum(bool(each.overflowing) for each in encoded.encodings or ())
    if cut:
        what = "text" if len(texts) == 1 else "pair"
        total = len(encoded["input_ids"])
        task.note(f"{cut:,} of {counted(total, what)} cut to {limit} tokens (--max-length)")
    return encoded


def input_rows(
    task: Task,
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    labels: Sequence[Any],
    limit: int,
) -> list[dict[str, Any]]:
    """Make an input of each example, of one text or of two; one that is too long is cut where its
    longer text ends. A note of `task` says how many were cut.
    """
    encoded = encode_cut(task, tokenizer, list(zip(*texts, strict=True)), limit)
    columns = {**encoded, "labels": labels}
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
