"""`downstream --log`: trackers receive the losses of a training and its scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from teachonce.downstream.cli import main
from teachonce.downstream.mlm.masked_trainer import MlmTrainer
from teachonce.downstream.progress import Progress
from teachonce.support.signals import Stopped
from tests.downstream.learnable import classified
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
    progress = Progress(lines.append, {"held-out loss": "eval_loss"}, "seed 0, ")
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
    progress = Progress(lines.append, {}, "seed 0, ")
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
