"""Options of an optimiser step in fine-tuning: accumulation, optimizer, number, warm-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.pair import PairScore
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.downstream.tasks.task_interface import Task
from tests.downstream.learnable import classified, paired, splits, write_tagged
from tests.making.models import Teachers

WEIGHTS = "model.safetensors"


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the gradient norm of each step, as the Trainer clips it."""
    found: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def spied(*given: Any, **named: Any) -> torch.Tensor:
        norm = clip(*given, **named)
        found.append(float(norm))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spied)
    return found


def tuned(
    task: Task, model: Path, train: Path, keep: Path | None = None, **settings: Any
) -> list[str]:
    lines: list[str] = []
    files = {"train": train, "dev": train}
    asked = FineTuneSettings(seeds=1, max_length=32, **settings)
    fine_tune(task, str(model), files, asked, lines.append, keep)
    return lines


@pytest.mark.parametrize(
    ("task", "write", "rows"),
    [(Classify, classified, 15), (PairScore, paired, 15), (PartsOfSpeech, write_tagged, 16)],
)
def test_accumulated_batches_have_the_gradient_of_one_large_batch(
    task: type[Task],
    write: Callable[..., Path],
    rows: int,
    norms: list[float],
    tiny_teacher: Teachers,
    tmp_path: Path,
) -> None:
    """Also at the end of an epoch with an incomplete batch. The model has no dropout."""
    train, model = write(tmp_path / "train.tsv", rows, 0), tiny_teacher("modernbert")
    steps = []
    for size, accumulate in ((12, 1), (4, 3)):
        norms.clear()
        more: Any = {"batch_size": size, "accumulate": accumulate, "lr": 1e-4, "epochs": 2}
        tuned(task(), model, train, **more)
        steps.append(list(norms))
    assert len(steps[0]) == 4
    assert steps[1] == pytest.approx(steps[0], rel=1e-2)


def test_a_step_of_lamb_is_as_long_as_the_matrix_times_the_rate(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    model, lr = tiny_teacher("bert"), 1e-2
    train = classified(tmp_path / "train.tsv", 12, 0)
    tuned(Classify(), model, train, tmp_path / "m", optimizer="lamb", lr=lr, steps=1, warmup=0.0)
    before, after = load_file(model / WEIGHTS), load_file(tmp_path / "m" / WEIGHTS)
    matrices = [name for name in before if "layer" in name and before[name].dim() > 1]
    assert len(matrices) == 24
    for name in matrices:
        expected = lr * min(float(before[name].norm()), 10)
        assert float((after[name] - before[name]).norm()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("warmup", [0.1, 0.0])
def test_a_single_step_trains_also_with_a_warm_up(
    warmup: float, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """The first step of transformers' warm-up has a rate of 0."""
    model, train = tiny_teacher("bert"), classified(tmp_path / "train.tsv", 12, 0)
    before = load_file(model / WEIGHTS)
    tuned(Classify(), model, train, tmp_path / "m", lr=1e-3, steps=1, warmup=warmup)
    after = load_file(tmp_path / "m" / WEIGHTS)
    assert not any(torch.equal(before[name], after[name]) for name in before if "layer" in name)


def test_steps_end_within_an_epoch_and_are_scored(
    norms: list[float], tiny_teacher: Teachers, tmp_path: Path
) -> None:
    train = classified(tmp_path / "train.tsv", 12, 0)
    lines = tuned(Classify(), tiny_teacher("bert"), train, batch_size=4, steps=5)
    printed = [line.partition(":")[0] for line in lines if line.startswith("seed 0, ")]
    ahead = "seed 0, 5 steps of 4 x 1 texts"
    assert printed == [ahead, "seed 0, step 3/5", "seed 0, step 5/5"] and len(norms) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "lr"), [("lamb", 5e-3), pytest.param("adadelta", None, marks=pytest.mark.apart)]
)
def test_it_learns_with_other_optimizers(
    optimizer: str, lr: float | None, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Training works with other optimizers. Adadelta's own rate is 1."""
    files = splits(write_tagged, tmp_path, train=120, dev=30)
    settings = FineTuneSettings(epochs=5, batch_size=4, optimizer=optimizer, lr=lr, seeds=1)
    found = fine_tune(PartsOfSpeech(), str(tiny_teacher("bert")), files, settings, lambda _: None)
    assert found["seeds"][0]["lr"] == (lr or 1) and found["mean"]["dev"]["accuracy"] > 0.9
