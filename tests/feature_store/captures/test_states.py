"""Files of hidden states become stores whose rows are the teacher's states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, Words, ok
from tests.end_to_end.support import refused as failing
from tests.feature_store.captures.conftest import imported
from tests.feature_store.captures.making import Taught, distillkit, specforge, speculators


def check_states(path: Path, samples: list[Taught], close: float, **states: str) -> None:
    store = open_store(path)
    assert store.features.hidden == tuple(states)
    for record, sample in zip(store, samples, strict=True):
        assert record.text == sample.text
        for name, layer in states.items():
            true = (sample.unnormed if layer == "unnormed" else sample.states[int(layer)]).numpy()
            assert np.abs(record.views[0].hidden[name] - true).max() < close * np.abs(true).max()


def test_speculators(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """The tool's own layers are known from the teacher's depth; its last one has no final norm."""
    source = speculators(tmp_path / "data", samples, (2, 2, 1))
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "2,3,1,4", "--codec", "exact")
    assert "hidden layer2, layer3, layer1, layer4-before-norm (width 32)" in said
    names = {"layer2": "2", "layer3": "2", "layer1": "1", "layer4-before-norm": "unnormed"}
    check_states(tmp_path / "a.zarr", samples, 0.01, **names)


@pytest.mark.parametrize("gz", (False, True))
def test_specforge(gz: bool, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """Padding of a batch, which is captured too, is no text."""
    source = specforge(tmp_path / "data", samples, (1, 2, 3), padded=3, gz=gz)
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    assert f"specforge, {len(samples)} samples" in said and "left out" not in said
    names = {f"layer{n}": str(n) for n in (1, 2, 3, 4)}
    check_states(tmp_path / "a.zarr", samples, 0.02, **names)


def test_a_student_learns_from_an_imported_store(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """Of a causal teacher states are learnt; logits of the token after each are not."""
    source = speculators(tmp_path / "data", samples * 2, (1, 2, 3))
    imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    words: Words = ("--vocab", "300", *STUDENT, "--steps", "16", "--lr", "1e-2", "--store")
    own = (tmp_path / "a.zarr", "--loss", "hidden=1", "--out", tmp_path / "s")
    ok(student_train, *words, *own)
    result = json.loads((tmp_path / "s/training.json").read_text())["result"]
    assert result["valid_hidden"] < 0.95  # the mean of all states has 1

    capture = distillkit(tmp_path / "logits", samples, 8, 8)
    imported(capture, tmp_path / "b.zarr", teacher)
    own = (tmp_path / "b.zarr", "--loss", "kl=1", "--out", tmp_path / "k")
    assert "next-token logits" in failing(student_train, *words, *own)
