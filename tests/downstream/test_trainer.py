"""Fine-tuning: its trackers, and the options of an optimiser step.

- `downstream --log`: trackers receive the losses of a training and its scores.
- Options of an optimiser step in fine-tuning: accumulation, optimizer, number, warm-up.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from teachonce.downstream.cli import main
from teachonce.downstream.mlm.masked_trainer import MlmTrainer
from teachonce.downstream.progress import TrainingProgress
from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.pair import PairScore
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.downstream.tasks.task_interface import Task
from teachonce.support.signals import Stopped
from tests.downstream.support import classified, paired, splits, write_tagged
from tests.end_to_end.support import Words, invoke, ok, refused, says
from tests.making.models import Teachers
from tests.making.texts import SENTENCES
from tests.training.tracker_packages import install, recorded


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield install(tmp_path, monkeypatch)
    sys.modules.pop("wandb", None)


def heard(file: Path, run: str) -> dict[str, dict[int, float]]:
    """Return the logged values of a run, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for each in recorded(file):
        if each["id"] == run:
            for name, value in each.get("log", {}).items():
                found.setdefault(name, {})[each["step"]] = value
    return found


def test_each_seed_of_a_fine_tuning_is_a_run(
    tiny_teacher: Teachers, file: Path, tmp_path: Path
) -> None:
    train, out = classified(tmp_path / "train.tsv", 24, 0), tmp_path / "out"
    words: Words = ("--task", "classify", "--model", tiny_teacher("bert"), "--train", train)
    words += ("--dev", train, "--test", train, "--max-length", "32", "--batch-size", "2")
    ok(main, *words, "--epochs", "1", "--seeds", "2", "--out", out, "--log", "wandb")
    runs = [each for each in recorded(file) if "init" in each]
    assert [(each["init"], each["group"]) for each in runs] == [
        ("seed-0", "out"),
        ("seed-1", "out"),
    ]
    assert runs[1]["config"]["task"] == "classify" and runs[1]["config"]["seed"] == 1
    scores = json.loads((out / "scores.json").read_text())
    for run, expected in zip(runs, scores["seeds"], strict=True):
        figures = heard(file, run["id"])
        assert set(figures["loss"]) == set(figures["lr"]) == {10, 12}
        assert set(figures["valid_loss"]) == {12}
        for split in ("dev", "test"):
            assert figures[f"{split}_accuracy"] == {12: expected[split]["accuracy"]}
    assert [each["finish"] for each in recorded(file) if "finish" in each] == [0, 0]
    assert [path.name for path in out.iterdir()] == ["scores.json"]  # no tracker file


@pytest.mark.slow
def test_a_masked_lm_goes_on_with_its_run(
    tiny_teacher: Teachers, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n".join(SENTENCES * 3), encoding="utf-8")
    words: Words = (
        "--task", "mlm", "--model", tiny_teacher("bert"), "--train", text, "--dev", text,
    )  # fmt: skip
    words += ("--test", text, "--steps", "12", "--batch-size", "2", "--max-length", "16")
    words += ("--evaluate-every", "4", "--out", out, "--log", "wandb")
    step = MlmTrainer.training_step

    def stop(self: MlmTrainer, *args: Any, **named: Any) -> Any:
        if self.state.global_step == 8:
            raise Stopped
        return step(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(MlmTrainer, "training_step", stop)
        assert invoke(main, *words).exit_code == 130
    ok(main, *words, "--resume")
    runs = {each["id"] for each in recorded(file)}
    (run,) = runs
    assert [each["finish"] for each in recorded(file) if "finish" in each] == [1, 0]
    figures, scores = heard(file, run), json.loads((out / "scores.json").read_text())
    assert set(figures["loss"]) == {4, 8, 10, 12} and set(figures["valid_loss"]) == {4, 8, 12}
    assert figures["valid_loss"][12] == scores["seeds"][0]["dev"]["loss"]
    assert figures["test_loss"] == {12: scores["seeds"][0]["test"]["loss"]}
    assert "log" not in scores["settings"]


def test_a_tracker_is_refused_early(file: Path, tmp_path: Path) -> None:
    words = ("--task", "pos", "--model", "m", "--train", "t", "--dev", "d", "--out", tmp_path / "o")
    says(refused(main, *words, "--log", "neptune"), "--log neptune", "wandb, mlflow, trackio")
    (file.parent / "packages" / "trackio.py").unlink()
    says(refused(main, *words, "--log", "trackio"), "pip install trackio")
    says(refused(main, "--task", "speed", "--model", "m", "--log", "wandb"), "does not take --log")


def test_a_loss_that_is_reported_is_the_mean_since_the_last_evaluation() -> None:
    lines: list[str] = []
    progress = TrainingProgress(lines.append, {"held-out loss": "eval_loss"}, "seed 0, ")
    state = TrainerState(max_steps=20)
    progress.on_train_begin(None, state, None)
    for step, loss in ((4, 3.0), (6, 6.0)):
        state.global_step = step
        progress.on_log(None, state, None, logs={"loss": loss})
    state.num_input_tokens_seen = 1000
    progress.on_evaluate(None, state, None, metrics={"eval_loss": 2.5})
    state.global_step = 20
    progress.on_log(None, state, None, logs={"loss": 1.0})
    progress.on_evaluate(None, state, None, metrics={"eval_loss": 1.5})
    progress.on_train_end(None, state, None)
    assert lines[0].startswith("seed 0, step 6/20: loss 4.0000, held-out loss 2.5000; ")
    assert lines[1].startswith("seed 0, step 20/20: loss 1.0000, ")
    assert lines[1].endswith(" tokens/s, 00:00 left")


def test_a_pipe_hears_of_a_long_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    progress = TrainingProgress(lines.append, {}, "seed 0, ")
    state = TrainerState(max_steps=20)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    progress.on_train_begin(None, state, None)
    state.global_step, state.num_input_tokens_seen = 3, 600
    progress.on_step_end(None, state, None)
    assert not lines
    monkeypatch.setattr("teachonce.downstream.progress.QUIET", 0.0)
    progress.on_step_end(None, state, None)
    progress.on_train_end(None, state, None)
    assert len(lines) == 1 and lines[0].startswith("seed 0, step 3/20; ")
    assert " tokens/s, " in lines[0] and lines[0].endswith(" left")


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
