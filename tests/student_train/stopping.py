"""Stop trainings after a step, as by a kill, and resume them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from teachonce.store import FeatureStore
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import Trained, train


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
