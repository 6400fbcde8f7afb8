"""The task pair: scores two texts that are read as one input, for example by similarity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification

from teachonce.checkpoints.labels import PAIRS, activated, score_activation
from teachonce.checkpoints.loading import load_config
from teachonce.checkpoints.names import ResolvedModel
from teachonce.downstream.tasks.example_rows import Row, read_rows
from teachonce.downstream.tasks.score_scale import standardise, unstandardise
from teachonce.downstream.tasks.task_interface import Task, input_rows
from teachonce.store import TaskSpec
from teachonce.support.errors import UserError


@dataclass(frozen=True)
class Pair:
    """Holds two texts, their gold score on any scale, and their file and line for errors."""

    text_a: str
    text_b: str
    score: float
    where: str = field(default="", compare=False)


class PairScore(Task):
    """Scores tables of `text_a`, `text_b` and `score`. The best epoch has the highest Pearson's r.

    Both texts are one input. The head is trained by the squared error of the score, standardised
    over the training examples. A saved head gives scores on the scale of the examples.

    `activation` is the class of torch.nn that turns a logit into the score of a reranker; "" for
    none, as in training.

    columns: names of columns by role (`text_a`, `score`, ...), if they differ from the role.
    """

    name = "pair"
    noun = "score"
    model_class = AutoModelForSequenceClassification
    measures = {"Pearson": "pearson", "Spearman": "spearman"}
    primary = "pearson"

    def __init__(self, columns: Mapping[str, str] | None = None) -> None:
        self.columns = columns or {}
        self.shift, self.scale = 0.0, 1.0
        self.activation = ""

    def options(self) -> dict[str, Any]:
        return {"columns": dict(self.columns)}

    def read(self, path: Path) -> list[Pair]:
        return [
            Pair(
                row.text("text_a", self.columns),
                row.text("text_b", self.columns),
                _score(row, self.columns),
                row.where,
            )
            for row in read_rows(path)
        ]

    def prepare(self, splits: Mapping[str, Sequence[Pair]]) -> None:
        """Find the scale of the scores in `train`; see `Task.prepare`.

        Raises UserError if all scores of a split are equal: they have no correlation.
        """
        check_scores(splits)
        # Standardised, so that no step is spent on the scale: correlations do not depend on it.
        scores = np.array([pair.score for pair in splits["train"]])
        self.shift, self.scale = float(scores.mean()), float(scores.std())

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Pair]]) -> None:
        """Check head and scores; see `Task.adopt`.

        Raises UserError unless the model has one output, and if all scores of a split are equal.
        """
        labels = spec.labels
        if len(labels) != 1:
            raise UserError(
                f"--model: has {len(labels)} labels, {', '.join(labels)[:200]}; --task pair needs a"
                " single output, as `downstream --task pair --save` trains it"
            )
        check_scores(splits)

    def head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def load_fresh(self, model: ResolvedModel) -> tuple[Any, Any]:
        tokenizer, network = super().load_fresh(model)
        standardise(network, load_config(model))
        return tokenizer, network

    def load_own(self, model: ResolvedModel) -> tuple[Any, Any, TaskSpec]:
        tokenizer, network, spec = super().load_own(model)
        self.activation = score_activation(model.name, network.config, spec)
        return tokenizer, network, spec

    def finish(self, network: Any) -> str:
        network.config.update({PAIRS: True})
        if unstandardise(network, self.shift, self.scale):
            return (
                "its scores are on the scale of the training examples, in `student-predict --pairs`"
                " and in CrossEncoder of sentence-transformers"
            )
        return (
            "its scores are standardised, because its last layer has no bias; multiply them by"
            f" {self.scale:g} and add {self.shift:g}"
        )

    def texts(self, examples: Sequence[Pair]) -> list[str]:
        return [text for pair in examples for text in (pair.text_a, pair.text_b)]

    def encode(self, tokenizer: Any, examples: Sequence[Pair], limit: int) -> list[dict[str, Any]]:
        texts = [(pair.text_a, pair.text_b) for pair in examples]
        return input_rows(self, tokenizer, texts, self.labels(examples), limit)

    def labels(self, examples: Sequence[Pair]) -> list[float]:
        """Return the scores on the scale that `prepare` found."""
        return [(pair.score - self.shift) / self.scale for pair in examples]

    def gold(self, examples: Sequence[Pair]) -> list[float]:
        return [pair.score for pair in examples]

    def predicted(
        self, examples: Sequence[Pair], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> list[float]:
        logits = np.asarray(predictions, np.float64).reshape(-1, 1)
        scores = self.shift + self.scale * activated(logits, self.activation)
        return [float(score) for score in scores.reshape(-1)]

    def score(
        self, examples: Sequence[Pair], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute scipy's correlations; both are 0 if all predicted scores are equal."""
        from scipy.stats import pearsonr, spearmanr

        predicted = self.predicted(examples, rows, predictions)
        # scipy returns NaN for a constant. No later epoch compares as better than NaN.
        if np.ptp(predicted) == 0:
            return {"pearson": 0.0, "spearman": 0.0}
        gold = self.gold(examples)
        return {
            "pearson": float(pearsonr(gold, predicted).statistic),
            "spearman": float(spearmanr(gold, predicted).statistic),
        }


def check_scores(splits: Mapping[str, Sequence[Pair]]) -> None:
    """Raise UserError if all scores of a split are equal: they have no correlation."""
    for name, pairs in splits.items():
        if len({pair.score for pair in pairs}) < 2:
            raise UserError(
                f"--{name}: every score is {pairs[0].score:g} (from {pairs[0].where} on); a"
                " correlation needs different scores, add pairs"
            )


def _score(row: Row, columns: Mapping[str, str]) -> float:
    value = row.cell("score", columns)
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    # float() also reads `nan` and `inf`.
    if not math.isfinite(score):
        raise UserError(
            f"{row.where}: expected a number as score, got {value!r:.60}; write it like 3.5"
        )
    return score
