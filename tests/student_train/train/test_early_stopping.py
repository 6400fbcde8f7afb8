"""Validation once per epoch, and stages that end early, are the same after a stop."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.train.student_training import train
from teachonce.student_train.train.training_log import METRICS
from tests.end_to_end.support import ok
from tests.student_train import support
from tests.student_train.stopping import resume, same_weights, stop

AWAY = 0.3  # a rate at which a student loses its progress
STAGES: tuple[dict[str, Any], ...] = (
    {"lr": AWAY, "patience": 2, "eval_every": 2, "steps": 40},
    {"loss": {"hidden": 1.0}, "steps": 4},
)


options_for = partial(support.options_for, loss={"mlm": 1.0}, clip=50.0, warmup=0.0)


def validations(out: Path) -> dict[int, float]:
    """Return the validation losses by step; each step has one."""
    rows = map(json.loads, (out / METRICS).read_text().splitlines())
    found = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_a_stage_ends_when_patience_does_and_the_next_begins(
    store: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(store, stages=STAGES)
    student, collator, _ = prepare(options, store)
    trained = train(store, student, collator, options, tmp_path)
    first = list(validations(tmp_path).items())[: -len(range(1, 5))]
    steps, losses = zip(*first, strict=True)
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 20  # two more after the best
    assert steps[-1] == 2 * len(losses) and trained.steps == steps[-1] + 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "later", [0, *(pytest.param(later, marks=pytest.mark.apart) for later in (-1, 2))]
)
def test_a_stop_about_the_early_end_changes_nothing(
    store: FeatureStore, tmp_path: Path, later: int
) -> None:
    options = options_for(store, stages=STAGES, checkpoint_every=1)
    whole, collator, _ = prepare(options, store)
    straight = tmp_path / "straight"
    straight.mkdir()
    trained = train(store, whole, collator, options, straight)
    torn = tmp_path / "torn"
    stop(store, options, torn, trained.steps - 4 + later)
    again, resumed, _ = resume(store, options, torn)
    assert resumed.steps == trained.steps and resumed.validation == trained.validation
    assert validations(torn) == validations(straight)
    same_weights(whole, again)


def test_validation_once_an_epoch(store: FeatureStore, tmp_path: Path) -> None:
    options = options_for(store, eval_every="epoch", epochs=3.0, batch_texts=9, accumulate=2)
    student, collator, _ = prepare(options, store)
    train(store, student, collator, options, tmp_path)
    blocks, _ = split_blocks(store, options.held_out)
    epoch = store.batch_count(0, 0, blocks=blocks, batch_texts=9) / 2
    assert list(validations(tmp_path)) == [round(epoch), 2 * round(epoch), round(3 * epoch)]


def test_from_the_command_line(store: FeatureStore, tmp_path: Path) -> None:
    words = ("--store", store.path, "--vocab", 400, "--student", "16x2x2", "--device", "cpu")
    length = ("--steps", 2, "--eval-every", "epoch", "--patience", 3, "--best")
    said = ok(main, *words, *length, "--batch-texts", 8, "--optimizer", "adadelta",
              "--out", tmp_path / "a")  # fmt: skip
    assert "2 steps of 8 x 1 texts, adadelta, lr 1 linear" in said
