"""Small trainings and what they read, for the tests of this folder.

- Small trainings: their options, the student at its start, its first batch and its validation.
- Stop trainings after a step, as by a kill, and resume them.
- A teacher's stored logits, for tests of targets and losses.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import evaluate
from teachonce.student_train.train.student_training import Trained, train
from teachonce.support.arrays import Array


def options_for(store: FeatureStore, **changes: Any) -> TrainOptions:
    """Make options of a small student in fp32 on the CPU, with these changes."""
    small: dict[str, Any] = {"vocab": "400", "student": "16x2x2", "device": "cpu"}
    small |= {"precision": "fp32"} | ({} if "batch_texts" in changes else {"batch_tokens": 512})
    return TrainOptions(store.path, **small | changes).resolved()


def prepared(store: FeatureStore, **changes: Any) -> tuple[Any, Any, TrainOptions]:
    """Return a student of these options with its initial weights, its collator, and the options."""
    options = options_for(store, **changes)
    student, collator, _ = prepare(options, store)
    return student, collator, options


def distilling(store: FeatureStore, **changes: Any) -> tuple[Distiller, Any, TrainOptions]:
    """Return the distiller of such a student in evaluation mode, its collator, and the options."""
    student, collator, options = prepared(store, **changes)
    return Distiller.of(student, options, store).eval(), collator, options


def first_batch(store: FeatureStore, collator: Collator, tokens: int = 512) -> StudentBatch:
    """Return the first batch of the plain view."""
    raw = next(iter(store.stream(0, 0, tokens, features=collator.features())))
    return collator(raw, 0, (0,)).to(torch.device("cpu"))


def validated(
    distiller: Distiller, store: FeatureStore, collator: Collator, options: TrainOptions
) -> dict[str, float]:
    """Return the figures of a validation over the held-out texts."""
    _, held_out = split_blocks(store, options.held_out)
    return evaluate(distiller, store, collator, held_out, BatchPlan(options, distiller.terms))


class Killed(BaseException):
    """Raised to end a training; no code catches it."""


def stop(store: FeatureStore, options: TrainOptions, out: Path, last: int) -> None:
    """Train into a folder and stop after step `last`."""

    def killed(step: int, losses: dict[str, float]) -> None:
        if step > last:
            raise Killed

    out.mkdir(exist_ok=True)
    student, collator, _ = prepare(options, store)
    with pytest.raises(Killed):
        train(store, student, collator, options, out, on_step=killed)


def resume(store: FeatureStore, options: TrainOptions, out: Path) -> tuple[Any, Trained, list[str]]:
    """Resume a training: return the student, the training's result, and the printed lines."""
    student, collator, _ = prepare(options, store)
    said: list[str] = []
    done = train(store, student, collator, options, out, resume=True, say=said.append)
    return student, done, said


def same_weights(one: Any, other: Any) -> None:
    """Check that two students have the same weights, to the last bit."""
    weights = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, weights[name]), name


G, V_TEACHER, V_STUDENT = 6, 40, 12


def teacher_logits(seed: int) -> Array:
    """Logits [G, V_TEACHER] of a teacher."""
    return np.random.default_rng(seed).normal(0, 3, (G, V_TEACHER))


def kept_logits(seed: int, k: int) -> tuple[Array, Array, Array, Array]:
    """Return the `k` best logits as in a store: ids and log-probabilities [G, k], log of the
    probability of all others [G], log-partitions [G]."""
    logits = teacher_logits(seed)
    log_partition = np.log(np.exp(logits).sum(1))
    ids = np.argsort(-logits, axis=1)[:, :k]
    logprobs = np.take_along_axis(logits, ids, 1) - log_partition[:, None]
    rest = np.log(np.maximum(0, 1 - np.exp(logprobs).sum(1)))
    return ids, logprobs, rest, log_partition.astype(np.float32)
