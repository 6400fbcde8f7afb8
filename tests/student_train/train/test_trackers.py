"""`--log`: a tracker receives the content of metrics.jsonl."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.sweep.cli import main as student_sweep
from tests.end_to_end.support import STUDENT, ok, report_of
from tests.training.tracker_packages import install, recorded


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield install(tmp_path, monkeypatch)
    sys.modules.pop("wandb", None)


def test_a_tracker_hears_what_metrics_has(store: FeatureStore, file: Path, tmp_path: Path) -> None:
    words = ("--store", store.path, "--vocab", "450", *STUDENT, "--log", "wandb")
    ok(student_train, *words, "--steps", "3", "--out", tmp_path / "mine")
    metrics = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    started, *heard, ended = recorded(file)
    assert [{"step": each["step"], **each["log"]} for each in heard] == [*map(json.loads, metrics)]
    assert started["init"] == "mine" and started["config"]["steps"] == 3 and ended["finish"] == 0
    # The tracker is specific to a machine: it neither changes a student's name nor prevents a
    # resume.
    settings = report_of(tmp_path / "mine")["settings"]
    assert "log" not in settings
    file.unlink()
    rates = ("--lr", "0.001", "--lr", "0.002")
    ok(student_sweep, *words, "--steps", "1", *rates, "--out", tmp_path / "sweep")
    assert [each["group"] for each in recorded(file) if "init" in each] == ["sweep", "sweep"]
    assert len({each["id"] for each in recorded(file)}) == 2
