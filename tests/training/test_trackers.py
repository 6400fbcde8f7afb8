"""Trackers receive the figures, continue their run after a resume, and never end a training."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from teachonce.support.errors import UserError
from teachonce.training.trackers import (
    RunDescription,
    Trackers,
    check_installed,
    check_known,
    parse_trackers,
)
from tests.training.tracker_packages import install, recorded

NAMES = ("wandb", "mlflow", "trackio")
SETTINGS = {"lr": 0.1, "loss": {"mlm": 1.0}, "freeze": [], "word_vectors": None}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the file of the calls that the packages of the trackers receive."""
    yield install(tmp_path, monkeypatch)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def facts(tmp_path: Path) -> RunDescription:
    folder = tmp_path / "sweep" / "student"
    folder.mkdir(parents=True)
    return RunDescription(folder, SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_figures_arrive_and_a_resume_goes_on_with_the_run(
    name: str, file: Path, facts: RunDescription
) -> None:
    lines: list[str] = []
    run = Trackers([name], facts, False, lines.append)
    run.add({"loss": 2.5, "lr": 0.1}, 1)
    run.add({"valid_loss": 3.0}, 1)
    run.close(False)
    first = recorded(file)
    figures = {key: value for each in first for key, value in each.get("log", {}).items()}
    assert figures == {"loss": 2.5, "lr": 0.1, "valid_loss": 3.0}
    assert {each["step"] for each in first if "log" in each} == {1}
    (started,) = (each for each in first if "init" in each)
    assert started["project"] == "teachonce" and started["group"] == "sweep"
    assert started["init"].startswith("student")
    (config,) = (each["config"] for each in first if "config" in each)
    assert {key: str(value) for key, value in config.items()} == {
        "lr": "0.1",
        "loss": '{"mlm": 1.0}',
    }
    assert first[-1]["finish"] in (1, "KILLED", 0)
    again = Trackers([name], facts, True, lines.append)
    again.add({"loss": 2.0}, 2)
    again.close(True)
    assert {each["id"] for each in recorded(file)} == {started["id"]}, "one run"
    assert recorded(file)[-1]["finish"] in (0, "FINISHED")
    other = Trackers([name], facts, False, lines.append)
    other.close(True)
    assert name == "mlflow" or recorded(file)[-1]["id"] != started["id"], (
        "a new training, a new run"
    )
    assert not lines


def test_mlflow_is_not_waited_for_at_every_step(file: Path, facts: RunDescription) -> None:
    run = Trackers(["mlflow"], facts, False, print)
    for step in range(7):
        run.add({"loss": 1.0, "lr": 0.1}, step)
    assert not any("log" in each for each in recorded(file))
    run.close(True)
    assert sum("log" in each for each in recorded(file)) == 14


def test_settings_are_sent_without_secrets(file: Path, facts: RunDescription) -> None:
    secret = replace(facts, settings={"store": "https://me:SECRETPW@host/a.zarr?token=SECRETPW"})
    Trackers(NAMES, secret, False, print).close(True)
    assert "SECRETPW" not in file.read_text() and "https://host/a.zarr" in file.read_text()


def test_a_tracker_that_fails_does_not_end_the_training(
    file: Path, facts: RunDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    run = Trackers(["wandb", "trackio"], facts, False, lines.append)
    monkeypatch.setenv("fail", "1")
    run.add({"loss": 1.0}, 1)
    run.add({"loss": 1.0}, 2)
    assert [each["step"] for each in recorded(file) if "log" in each] == [1, 2], "trackio's"
    (line,) = lines
    assert "wandb fails" in line and "the network is gone" in line and "metrics.jsonl" in line


def test_a_tracker_that_cannot_begin_is_reported_in_a_line(
    file: Path, facts: RunDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("refuse", "1")
    with pytest.raises(UserError, match=r"--log wandb: cannot start \(api_key not configured\)"):
        Trackers(["trackio", "wandb"], facts, False, print)
    assert recorded(file)[-1] == {"finish": 0, "id": recorded(file)[0]["id"]}, (
        "trackio's run is ended"
    )


def test_words_and_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_trackers(("wandb,mlflow", "wandb")) == ("wandb", "mlflow")
    with pytest.raises(UserError, match="--log neptune: expected wandb, mlflow, trackio"):
        check_known(["neptune"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="--log mlflow: mlflow is not installed; `pip install mlflow`"
    ):
        check_installed(["mlflow"])


def test_the_ids_are_kept_beside_the_student(file: Path, facts: RunDescription) -> None:
    Trackers(NAMES, facts, False, print).close(True)
    path = facts.folder / "trackers.json"
    assert json.loads(path.read_text()).keys() == set(NAMES)
    path.write_text("{")
    with pytest.raises(UserError, match=r"trackers.json: is not JSON .*; remove it to start new"):
        Trackers(NAMES, facts, True, print)
