"""A search: what it suggests, that it goes on as it would have, and what it ends early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.runs import Run, Runs
from teachonce.student_train.sweep.space import Interval, Space
from teachonce.student_train.sweep.trials import Trials
from teachonce.support.errors import UserError

pytest.importorskip("optuna")
SPACE: Space = {"lr": Interval(1e-4, 1e-1, True, False), "dropout": (0.0, 0.1)}


def begun(
    folder: Path, count: int, space: Space = SPACE, prune: str = "median"
) -> tuple[Trials, Runs]:
    runs = Runs(folder, space, list(space), searched=True)

    def make(point: Mapping[str, Any]) -> Run:
        number = len(runs.runs) + 1
        options = TrainOptions(store="s", out=folder / f"student{number}", **point)
        return runs.add(Run(number, {n: str(v) for n, v in point.items()}, options))

    return Trials(space, count, 7, runs, make, prune), runs


def finish(trials: Trials, runs: Runs, run: Run) -> None:
    """The rate 0.01 is best."""
    loss = abs(run.options.resolved_lr - 0.01)
    run.state, run.result = "finished", {"valid_mlm_per_character": loss}
    trials.ended(run)
    runs.write()


def all_of(trials: Trials, runs: Runs) -> list[float]:
    while run := trials.next():
        finish(trials, runs, run)
    return [run.options.resolved_lr for run in runs.runs]


def test_a_killed_search_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = all_of(*begun(tmp_path / "whole", 14))
    assert len(whole) == 14 and len(set(whole)) == 14
    trials, runs = begun(tmp_path / "killed", 14)
    for _ in range(11):
        run = trials.next()
        assert run is not None
        finish(trials, runs, run)
    cut = trials.next()
    assert cut is not None
    cut.state = "running"
    runs.write()
    assert all_of(*begun(tmp_path / "killed", 14)) == whole
    assert len(all_of(*begun(tmp_path / "killed", 16))) == 16  # more of them, typed later


def test_other_ranges_are_refused(tmp_path: Path) -> None:
    all_of(*begun(tmp_path, 1))
    with pytest.raises(UserError, match="other ranges .*dropout was .*lr was"):
        begun(tmp_path, 1, {"lr": (0.1, 0.2)})


def test_a_bad_trial_is_pruned_and_stays_so(tmp_path: Path) -> None:
    trials, runs = begun(tmp_path, 6)
    for _ in range(5):
        run = trials.next()
        assert run is not None
        assert trials.validated(run, 10, {"valid_mlm_per_character": 1.0}) == ""
        finish(trials, runs, run)
    bad = trials.next()
    assert bad is not None
    bad.problem = trials.validated(bad, 10, {"valid_mlm_per_character": 3.0})
    assert "worse than the median" in bad.problem
    bad.state = "pruned"
    trials.ended(bad)
    runs.write()
    again, _ = begun(tmp_path, 6)
    assert len(all_of(again, again.runs)) == 6
    assert again.runs.runs[-1].state == "pruned"


def test_halving_ends_a_trial_whose_last_figure_is_learnt_from(tmp_path: Path) -> None:
    trials, runs = begun(tmp_path, 2, prune="asha")
    good, bad = trials.next(), trials.next()
    assert good is not None and bad is not None
    assert trials.validated(good, 10, {"valid_mlm_per_character": 1.0}) == ""
    told = trials.validated(bad, 10, {"valid_mlm_per_character": 3.0})
    assert told.startswith("not among the best third")
    bad.state, bad.problem = "pruned", told
    trials.ended(bad)
    assert trials.study.trials[-1].intermediate_values == {10: 3.0}


def test_a_student_that_nothing_compares(tmp_path: Path) -> None:
    space: Space = {"vocab": ("5k", "10k")}
    trials, runs = begun(tmp_path, 1, space)
    run = trials.next()
    assert run is not None
    run.state, run.result = "finished", {"valid_loss": 2.0}
    trials.ended(run)
    assert "add mlm to --loss" in run.problem
