"""The long checks of integrity, shortened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachonce.feature_store.captures.formats import FORMATS
from tests.integrity import capture_trials, damage, plain_tokenizers, trials


@pytest.mark.apart
def test_the_table(tmp_path: Path) -> None:
    counts = {"flips": 0, "stores": 2, "forgeries": 0, "characters": 640, "texts": 20}
    counts |= {"launderings": 30, "edits": 0, "tokenizers": 0, "networks": 2}
    rows, wrong = trials.checked(3, **counts)
    assert wrong == []
    assert [row[1:4] for row in rows] == [
        [2, 2, 0], [30, 30, 0], [2, 2, 0], [640, 640, 0], [20, 20, 0],
    ]  # fmt: skip


def test_a_finding_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "problems", lambda path: ["something"])
    (row,), wrong = trials.checked(3, stores=2)
    assert row[1:4] == [2, 0, 2] and len(wrong) == 2


def test_plain_tokenizers() -> None:
    rows, wrong = plain_tokenizers.trial(3, seed=5)
    assert wrong == []
    assert {str(row[0]) for row in rows} <= set(plain_tokenizers.KINDS) and rows


def test_a_tokenizer_that_ends_its_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tokenizers, "_use", lambda data: 1 / 0)
    _, wrong = plain_tokenizers.trial(1, seed=5)
    assert len(wrong) == 1 and "exit code 1: {" in wrong[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_forged_captures(kind: str, tmp_path: Path) -> None:
    """A few forged captures of each format are refused or imported, without memory limits."""
    whole, tokenizer = capture_trials.sound(kind, tmp_path), capture_trials.teacher(tmp_path)
    assert capture_trials.outcome(kind, whole, tmp_path / "a.zarr", tokenizer) == ("imported", "")
    for number in range(4):
        how, why = capture_trials.attempt(kind, tmp_path, 3, number, bounded=False)
        assert how in capture_trials.HOW, why


@pytest.mark.parametrize("kind", ("speculators", "vllm"))
def test_another_store_than_the_capture_is_found(kind: str, tmp_path: Path) -> None:
    whole, tokenizer = capture_trials.sound(kind, tmp_path), capture_trials.teacher(tmp_path)
    target = tmp_path / "a.zarr"
    assert capture_trials.outcome(kind, whole, target, tokenizer) == ("imported", "")
    samples = list(capture_trials.READ[kind](whole))
    assert capture_trials.unlike(target, samples, 0) == ""
    assert "tokens left out" in capture_trials.unlike(target, samples[:-1], 0)
    states, observed = samples[1].states, samples[1].observed
    changed: Any = states[2][0] if states else observed
    changed[0] += 1
    assert "of no sample behind" in capture_trials.unlike(target, samples, 0)
