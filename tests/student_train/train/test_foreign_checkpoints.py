"""A resumed training with an altered checkpoint or altered metrics gives an error line or a
complete curve."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teachonce.store import FeatureStore
from teachonce.student_train.train.training_log import METRICS
from teachonce.support.errors import UserError
from teachonce.training.checkpoint import load_checkpoint, write_checkpoint
from tests.student_train.stopping import resume, stop
from tests.student_train.support import options_for


@pytest.fixture
def stopped(store: FeatureStore, tmp_path: Path) -> Callable[[], list[str]]:
    """Stop a training after its third step, and return a function that resumes it and returns the
    lines."""
    options = options_for(store, loss={"mlm": 1.0}, steps=5, checkpoint_every=1)
    stop(store, options, tmp_path, 3)
    return lambda: resume(store, options, tmp_path)[2]


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(key)


FOREIGN: dict[str, Callable[[dict[str, Any]], object]] = {
    "no model": without("model"),
    "no schedule": without("schedule"),
    "another model": lambda state: state.update(model={"weight": torch.zeros(3)}),
    "another shape": lambda state: state["model"].update(
        {name: torch.zeros(1) for name in state["model"]}
    ),
    "no optimizer": lambda state: state.update(optimizer={}),
    "an odd step": lambda state: state.update(step="three"),
    "an odd stage": lambda state: state.update(stage=7),
    "odd tokens": lambda state: state.update(tokens=None),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_checkpoint_of_something_else(
    stopped: Callable[[], list[str]], tmp_path: Path, what: str
) -> None:
    state, _ = load_checkpoint(tmp_path / "checkpoints")
    assert state is not None
    FOREIGN[what](state)
    for path in (tmp_path / "checkpoints").iterdir():
        write_checkpoint(path, state)
    with pytest.raises(UserError, match="is not a checkpoint of this training .* remove"):
        stopped()


def test_metrics_that_have_lost_lines_are_reported(
    stopped: Callable[[], list[str]], tmp_path: Path
) -> None:
    metrics = tmp_path / METRICS
    os.truncate(metrics, 20)  # in the middle of the first line
    resumed, printed, _ = stopped()  # and also the masks that it reads
    assert "lacks lines from before step 4" in printed and "after step 3" in resumed
    lines = metrics.read_text().splitlines()
    assert len(lines) > 2 and all(line.startswith('{"step"') for line in lines)


def test_metrics_that_are_gone(stopped: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / METRICS).unlink()
    assert any("lacks lines" in line for line in stopped())
