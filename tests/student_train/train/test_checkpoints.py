"""The steps at which a training saves, with and without --checkpoint-every."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachonce.store import FeatureStore
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.train import student_training
from teachonce.student_train.train.student_training import train
from teachonce.student_train.train.training_log import METRICS
from teachonce.support.errors import UserError
from tests.student_train.stopping import resume, same_weights, stop
from tests.student_train.support import options_for


def saved(out: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.stem[5:]) for path in (out / "checkpoints").glob("step-*.pt"))


@pytest.mark.parametrize(
    ("seconds", "every", "expected"), [(1e9, None, [4]), (0.0, None, [4, 5]), (0.0, 3, [3])]
)
def test_a_slow_training_saves_between_validations(
    store: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    every: int | None,
    expected: list[int],
) -> None:
    monkeypatch.setattr(student_training, "UNSAVED", seconds)
    changes: dict[str, Any] = {"eval_every": 4, "schedule": "plateau", "best": True, "dropout": 0.1}
    changes |= {"loss": {"mlm": 1.0}, "steps": 7, "lr": 1e-2, "checkpoint_every": every}
    options = options_for(store, **changes)
    straight, collator, _ = prepare(options, store)
    whole, torn = tmp_path / "new" / "whole", tmp_path / "torn"
    with pytest.raises(UserError, match="resume=True needs out"):
        train(store, straight, collator, options, resume=True)
    train(store, straight, collator, options, whole)
    stop(store, options, torn, 5)
    assert saved(torn) == expected
    again, _, said = resume(store, options, torn)
    assert said[0] == f"resume    after step {expected[-1]}"
    same_weights(straight, again)
    assert (torn / METRICS).read_bytes() == (whole / METRICS).read_bytes()


def test_a_training_neither_replaces_nor_continues_another(
    store: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(store, loss={"mlm": 1.0}, steps=7, checkpoint_every=2)
    stop(store, options, tmp_path, 6)
    student, collator, _ = prepare(options, store)
    # The checkpoints of a new training would be removed as older ones: a resume read the others.
    with pytest.raises(UserError, match=r"saved at step 6 .*continue it with resume=True, remove"):
        train(store, student, collator, options, tmp_path)
    other = options_for(store, loss={"mlm": 2.0}, steps=7, checkpoint_every=2, seed=4)
    changed = "loss was mlm=1 and is mlm=2, seed was 0 and is 4"
    with pytest.raises(UserError, match=f"cannot resume with other settings: {changed}; give"):
        resume(store, other, tmp_path)
    assert saved(tmp_path) == [4, 6]
    assert resume(store, options, tmp_path)[2][0] == "resume    after step 6"
