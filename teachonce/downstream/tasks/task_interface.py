"""The interface of tasks that a checkpoint is fine-tuned and scored for: class `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from transformers import DataCollatorWithPadding

from teachonce.checkpoints.labels import PAIRS
from teachonce.checkpoints.loading import load_with_fresh_head, load_with_own_head
from teachonce.checkpoints.names import ResolvedModel
from teachonce.downstream.options import check_option
from teachonce.downstream.tasks.score_scale import remove_scale
from teachonce.store import TaskSpec
from teachonce.support.console import counted
from teachonce.support.errors import UserError, suggest
from teachonce.teacher_dump.corpus.tag_schemes import NO_LABEL

IGNORED = -100
"""The label that the losses of transformers ignore."""


class Task(ABC):
    """Reads the files of a task, makes model inputs and scores predictions.

    `fine_tune` calls `read` for each file, `prepare` with all of them, and for each seed
    `load_fresh`, `sample`, `encode` and, after training, `score`. `score_as_is` calls `read`,
    `predict_own`, `load_own`, `adopt`, `encode` and `score`.
    """

    name: str
    model_class: Any
    """An AutoModelFor... of transformers."""
    measures: Mapping[str, str]
    """Keys of a score's figures by heading. Larger is better, 1 is best."""
    primary: str
    """The key of the figure that chooses the epoch."""
    noun = "answer"
    """What a prediction is, for messages."""
    max_length: ClassVar[int] = 128

    def note(self, line: str) -> None:
        """Record a line about conversions or truncation, for `take_notes`."""
        # Made here, because an __init__ of this class would have to be called by every subclass.
        self.__dict__.setdefault("_notes", []).append(line)

    def take_notes(self) -> list[str]:
        """Return the notes of `read` and `encode` on conversions and truncation, and clear them."""
        notes: list[str] = self.__dict__.pop("_notes", [])
        return notes

    def options(self) -> dict[str, Any]:
        """Return the task's own settings, for scores.json."""
        return {}

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """Read the examples of a file, at least one. Raises UserError with file and line."""

    @abstractmethod
    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """Derive the head's labels or scale from `train`. Raises UserError if splits do not fit."""

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """Take the labels from the head of a fine-tuned model, to score it without training.

        spec: the outputs of the head. Raises UserError if head and splits do not fit. A task that
        does not override this method always raises it.
        """
        raise UserError(
            f"--task {self.name}: its models cannot be scored without training; leave --as-is out"
        )

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return the config of the head: number of outputs, names of labels."""

    def load_fresh(self, model: ResolvedModel) -> tuple[Any, Any]:
        """Load tokenizer and network with a new head. Raises as `load_with_fresh_head` does."""
        tokenizer, network = load_with_fresh_head(model, self.model_class, self.head())
        remove_scale(network.config)
        vars(network.config).pop(PAIRS, None)  # recorded for an earlier head
        return tokenizer, network

    def load_own(self, model: ResolvedModel) -> tuple[Any, Any, TaskSpec]:
        """Load tokenizer, network and its task outputs. Raises as `load_with_own_head` does."""
        return load_with_own_head(model, self.model_class)

    def predict_own(
        self, model: str, splits: Mapping[str, Sequence[Any]], max_length: int | None
    ) -> Mapping[str, Any] | None:
        """Predict the examples of each split with the modules in the model's folder.

        Returns None, the default, if the folder has no such modules; `load_own` then loads the
        head.
        """
        return None

    def sample(self, train: Sequence[Any], seed: int) -> Sequence[Any]:
        """Choose the training examples of a seed; all by default."""
        return train

    def finish(self, network: Any) -> str:
        """Make a trained network ready to be saved. Returns a sentence for its users, "" for
        none."""
        return ""

    @abstractmethod
    def texts(self, examples: Sequence[Any]) -> list[str]:
        """Return the texts of the examples. `note_on_pieces` checks the tokenizer with them."""

    @abstractmethod
    def encode(self, tokenizer: Any, examples: Sequence[Any], limit: int) -> list[dict[str, Any]]:
        """Make model inputs of at most `limit` tokens, with labels and the fields `score` needs.

        An example may become several rows.
        """

    @abstractmethod
    def score(
        self, examples: Sequence[Any], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute each of `measures` from the Trainer's predictions for the rows."""

    def gold(self, examples: Sequence[Any]) -> Sequence[Any]:
        """Return the gold answers of all texts, words or pairs; () if predictions are not compared
        with them."""
        return ()

    def predicted(
        self, examples: Sequence[Any], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> Sequence[Any]:
        """Return the predicted answers of all texts, words or pairs, in the order of `gold`."""
        return ()

    def uncomputable(self, gold: Set[Any]) -> str:
        """Return the measures that have no value for a file with these gold answers, "" for
        none."""
        return ""

    def collator(self, tokenizer: Any) -> Any:
        """Return the collator that makes batches of rows."""
        return DataCollatorWithPadding(tokenizer)


class LabelTask(Task):
    """Defines a task whose outputs are labels of a text or of its words.

    unseen_labels: handling of labels that are missing in training, or in the head of a model that
    is scored without training. "refuse" raises UserError, "count" counts them as errors.
    """

    noun = "label"

    def __init__(self, unseen_labels: str = "refuse") -> None:
        check_option("unseen_labels", unseen_labels)
        self.unseen_labels = unseen_labels
        self.labels: list[str] = []

    def options(self) -> dict[str, Any]:
        return {"unseen_labels": self.unseen_labels}

    @abstractmethod
    def labels_of(self, example: Any) -> Sequence[str]:
        """Return the gold labels of an example."""

    @abstractmethod
    def where(self, example: Any, number: int) -> str:
        """Return the file and line of a gold label, for errors."""

    def gold(self, examples: Sequence[Any]) -> list[str]:
        return [label for example in examples for label in self.labels_of(example)]

    def uncomputable(self, gold: Set[Any]) -> str:
        return "Matthews" if len(gold) == 1 else ""

    def gold_labels(self) -> Sequence[str]:
        """Return the labels that an example may have. `labels` may have one more, a tagger's
        `later_label`."""
        return self.labels

    def prepare(self, splits: Mapping[str, Sequence[Any]]) -> None:
        """Take the labels of `train`. Raises UserError if another split has further labels, and
        for numbers that mean "no label"."""
        labels = {label for example in splits["train"] for label in self.labels_of(example)}
        self.labels = sorted(labels)
        self._check_numbers(splits)
        self._check(splits, "does not occur in training", "train on examples of it")

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Any]]) -> None:
        """Take the labels of the model. Raises UserError if a split has other labels."""
        self.labels = list(spec.labels)
        self._check(splits, "is unknown to the model", "name it as the model does")

    def _check_numbers(self, splits: Mapping[str, Sequence[Any]]) -> None:
        counted = not {"0", "0.0"}.isdisjoint(self.labels)  # pandas: 0.0 if some labels are missing
        none = {str(IGNORED), *([NO_LABEL] if counted else [])}
        for example, number, label in self._gold(splits):
            if label.removesuffix(".0") in none:
                raise UserError(
                    f"{self.where(example, number)}: {self.noun} {label} means no label if labels"
                    " are numbers; remove it, or name the class by a word"
                )

    def _check(self, splits: Mapping[str, Collection[Any]], problem: str, remedy: str) -> None:
        if self.unseen_labels == "count":
            return
        labels = self.gold_labels()
        allowed = set(labels)  # a set: with thousands of labels, a list would take minutes
        for example, number, label in self._gold(splits):
            if label not in allowed:
                raise UserError(
                    f"{self.where(example, number)}: {self.noun} {label!r} {problem}, which has"
                    f" {', '.join(labels)[:200]}; {suggest(label, labels)}{remedy}, remove it,"
                    " or count it as an error with --unseen-labels count"
                )

    def _gold(self, splits: Mapping[str, Collection[Any]]) -> Iterator[tuple[Any, int, str]]:
        """Yield each example with the number and the name of each of its labels."""
        for example in chain.from_iterable(splits.values()):
            for number, label in enumerate(self.labels_of(example)):
                yield example, number, label

    def head(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: number for number, label in enumerate(self.labels)},
            "problem_type": None,  # the checkpoint's may not fit the labels
        }


def encode_cut(task: Task, tokenizer: Any, texts: Sequence[Sequence[str]], limit: int) -> Any:
    """Encode texts or pairs, truncated to `limit` tokens. Add a note to `task` with the number of
    truncated texts or pairs.

    texts: the first text of each example and, for pairs, the second text of each.
    """
    encoded = tokenizer(*map(list, texts), truncation=True, max_length=limit)
    cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    if cut:
        noun = "text" if len(texts) == 1 else "pair"
        total = len(encoded["input_ids"])
        task.note(f"{cut:,} of {counted(total, noun)} cut to {limit} tokens (--max-length)")
    return encoded


def input_rows(
    task: Task,
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    labels: Sequence[Any],
    limit: int,
) -> list[dict[str, Any]]:
    """Make the input of each text or pair. Inputs that are too long are truncated at the end of the
    longer text; a note of `task` counts them."""
    encoded = encode_cut(task, tokenizer, list(zip(*texts, strict=True)), limit)
    columns = {**encoded, "labels": labels}
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
