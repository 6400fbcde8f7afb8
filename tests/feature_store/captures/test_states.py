"""Files of hidden states become stores whose rows are the teacher's states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, Words, ok, says
from tests.end_to_end.support import refused as failing
from tests.feature_store.captures.conftest import imported, run
from tests.feature_store.captures.test_engines import other_model
from tests.feature_store.captures.test_refusals import importing
from tests.making.captures import (
    Taught,
    distillkit,
    specforge,
    speculators,
    taught_by,
)
from tests.making.texts import ENGLISH


def check_states(path: Path, samples: list[Taught], close: float, **states: str) -> None:
    store = open_store(path)
    assert store.features.hidden == tuple(states)
    for record, sample in zip(store, samples, strict=True):
        assert record.text == sample.text
        for name, layer in states.items():
            true = (sample.unnormed if layer == "unnormed" else sample.states[int(layer)]).numpy()
            assert np.abs(record.views[0].hidden[name] - true).max() < close * np.abs(true).max()


def test_speculators(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """speculators' default layers follow from the teacher's depth; its last layer has no final
    norm."""
    source = speculators(tmp_path / "data", samples, (2, 2, 1))
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "2,3,1,4", "--codec", "exact")
    assert "hidden layer2, layer3, layer1, layer4-before-norm (width 32)" in said
    names = {"layer2": "2", "layer3": "2", "layer1": "1", "layer4-before-norm": "unnormed"}
    check_states(tmp_path / "a.zarr", samples, 0.01, **names)


@pytest.mark.parametrize("gz", (False, True))
def test_specforge(gz: bool, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """SpecForge also captures the padding of a batch, which is ignored as it is no text."""
    source = specforge(tmp_path / "data", samples, (1, 2, 3), padded=3, gz=gz)
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    assert f"specforge, {len(samples)} samples" in said and "left out" not in said
    names = {f"layer{n}": str(n) for n in (1, 2, 3, 4)}
    check_states(tmp_path / "a.zarr", samples, 0.02, **names)


def test_a_student_learns_from_an_imported_store(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """States can be trained on; logits of a causal teacher's next token cannot."""
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


@pytest.mark.parametrize("kind", [speculators, specforge])
def test_states_are_compared_with_the_model(
    kind: Any, teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """States are compared with the model: an engine may return the last state on the wrong side of
    the norm, or the states of another text of a batch (vLLM 50815, SpecForge 279)."""
    words, samples = ("--layers", "1,2,3,4", "--model", teacher), samples[:8]
    source = kind(tmp_path / "sound", samples, (1, 2, 3))
    says(imported(source, tmp_path / "a.zarr", teacher, *words), "agree with", "of their length")
    verified = run("verify", tmp_path / "a.zarr", "--model", teacher, "--device", "cpu")
    name = "layer4-before-norm" if kind is speculators else "layer4"
    assert f"view0/hidden/{name} " in verified.output, verified.output
    line = importing(source, teacher, "--layers", "2,1,3,4", *words[2:])
    says(line, "the captured states differ from its own by", "of other layers (--layers)")

    def refused(name: str, captured: list[Taught]) -> str:
        return importing(kind(tmp_path / name, captured, (1, 2, 3)), teacher, *words)

    turned = [
        replace(s, states=[*s.states[:-1], s.unnormed], unnormed=s.states[-1]) for s in samples
    ]
    says(refused("norm", turned), "--model", "differ from its own by", "of their length")
    one, two = samples[5], samples[6]
    size = min(len(one.ids), len(two.ids))
    mixed = [torch.cat([b[:size], a[size:]]) for a, b in zip(one.states, two.states, strict=True)]
    unnormed = torch.cat([two.unnormed[:size], one.unnormed[size:]])
    batch = [*samples[:5], replace(one, states=mixed, unnormed=unnormed), *samples[6:]]
    says(refused("batch", batch), "_5.", "token 0", "are off by up to", "of their length")
    other = taught_by(other_model(tmp_path / "other"), [s.text for s in samples])
    says(refused("rows", other), "--model", "is not the captured model")


@pytest.mark.parametrize("kind", ["states", "logits"])
def test_sequences_without_the_text_before_them_are_not_compared(
    kind: str, teacher: Path, tmp_path: Path
) -> None:
    """Outputs of the second sequence of a cut sample were captured with the tokens before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    rows = [tokenizer(text).input_ids for text in ENGLISH[:6]]
    captured = taught_by(teacher, [[*ids[:6], *spelled, *ids[6:]] for ids in rows])
    if kind == "states":
        source = speculators(tmp_path / "c", captured, (1, 2, 3))
    else:
        source = distillkit(tmp_path / "c", captured, 8, 8)
    words: Words = ("--layers", "1,2,3,4") if kind == "states" else ()
    assert "6 in part" in imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact", *words)
    done = run("verify", tmp_path / "a.zarr", "--model", teacher, "--device", "cpu")
    assert done.exit_code == 0, done.output
    says(done.output, "6 sequences, ", "6 sequences left out", "every error is within")
