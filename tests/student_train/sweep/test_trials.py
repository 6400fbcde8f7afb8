"""A search: its space, its suggestions, its continuation after a stop, and pruning.

- A search: its suggestions, its unchanged continuation after a stop, and pruning.
- The search space of a sweep: lists and ranges of a TOML file, with overrides from the command
  line.
"""

import importlib.util
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.sweep.execution import Execution
from teachonce.student_train.sweep.runs import Run, SweepRuns
from teachonce.student_train.sweep.space import (
    Interval,
    Space,
    arguments_of,
    corners,
    overridden,
    points,
    read_space,
    varied,
)
from teachonce.student_train.sweep.trials import ListedRuns, Study, Trials
from teachonce.support.errors import UserError
from tests.end_to_end.support import refused, says

pytest.importorskip("optuna")
SPACE: Space = {"lr": Interval(1e-4, 1e-1, True, False), "dropout": (0.0, 0.1)}


def started(
    folder: Path, count: int, space: Space = SPACE, prune: str = "median", **fixed: Any
) -> tuple[Trials, SweepRuns]:
    runs = SweepRuns(folder, space, list(space), searched=True)

    def make(point: Mapping[str, Any]) -> Run:
        number = len(runs.runs) + 1
        options = TrainOptions(store="s", **fixed, **point)
        options = replace(options, out=options.folder_in(folder))
        return runs.add(Run(number, {n: str(v) for n, v in point.items()}, options))

    return Trials(space, count, 7, runs, make, prune), runs


def finish(trials: Trials, runs: SweepRuns, run: Run) -> None:
    """Finish a run with results that are best at the rate 0.01."""
    loss = abs(run.options.resolved_lr - 0.01)
    run.state, run.result = "finished", {"valid_mlm_per_character": loss}
    trials.ended(run)
    runs.write()


def all_of(trials: Trials, runs: SweepRuns) -> list[float]:
    while run := trials.next():
        finish(trials, runs, run)
    return [run.options.resolved_lr for run in runs.runs]


def test_a_killed_search_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = all_of(*started(tmp_path / "whole", 14))
    assert len(whole) == 14 and len(set(whole)) == 14
    trials, runs = started(tmp_path / "killed", 14)
    for _ in range(11):
        run = trials.next()
        assert run is not None
        finish(trials, runs, run)
    cut = trials.next()
    assert cut is not None
    cut.state = "running"
    runs.write()
    assert all_of(*started(tmp_path / "killed", 14)) == whole
    assert len(all_of(*started(tmp_path / "killed", 16))) == 16  # more of them, typed later


def test_other_ranges_are_refused(tmp_path: Path) -> None:
    all_of(*started(tmp_path, 1))
    with pytest.raises(UserError, match="other ranges .*dropout was .*lr was"):
        started(tmp_path, 1, {"lr": (0.1, 0.2)})


@pytest.mark.parametrize(("fixed", "state"), [({}, "pruned"), ({"steps": 9}, "finished")])
def test_a_bad_trial_is_pruned_and_stays_so(
    tmp_path: Path, fixed: dict[str, Any], state: str
) -> None:
    """Unless another fixed option makes it another student."""
    trials, runs = started(tmp_path, 6)
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
    again, _ = started(tmp_path, 6, **fixed)
    assert len(all_of(again, again.runs)) == 6
    assert again.runs.runs[-1].state == state


def test_pruned_trials_are_skipped_at_one_depth_of_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of them would otherwise reach the limit of recursion."""
    trials, runs = started(tmp_path, 4)
    while run := trials.next():
        run.state, run.problem = "pruned", "worse than the median"
        trials.ended(run)
        runs.write()
    depths, repeat = list[int](), Trials.repeat

    def watched(trials: Trials, run: Run, before: Mapping[str, Any]) -> None:
        depths.append(len(inspect.stack(0)))
        repeat(trials, run, before)

    monkeypatch.setattr(Trials, "repeat", watched)
    again, runs = started(tmp_path, 5)
    run = again.next()
    assert run is not None and run.number == 5
    assert [each.state for each in runs.runs[:4]] == ["pruned"] * 4
    assert len(depths) == 4 and len(set(depths)) == 1


def test_halving_ends_a_trial_whose_last_figure_is_learnt_from(tmp_path: Path) -> None:
    trials, runs = started(tmp_path, 2, prune="asha")
    good, bad = trials.next(), trials.next()
    assert good is not None and bad is not None
    assert trials.validated(good, 10, {"valid_mlm_per_character": 1.0}) == ""
    printed = trials.validated(bad, 10, {"valid_mlm_per_character": 3.0})
    assert printed.startswith("not among the best third")
    bad.state, bad.problem = "pruned", printed
    trials.ended(bad)
    assert trials.study.trials[-1].intermediate_values == {1: 3.0}


def listed(folder: Path, count: int) -> SweepRuns:
    """Make a sweep of a list, whose runs are known in advance."""
    runs = SweepRuns(folder, {}, ["lr"], searched=False)
    for number in range(1, count + 1):
        options = TrainOptions(store="s", out=folder / f"student{number}", lr=number / 100)
        runs.add(Run(number, {"lr": str(number / 100)}, options))
    return runs


def judge(source: ListedRuns, run: Run, step: int, nats: float) -> str:
    return source.validated(run, step, {"valid_mlm_per_character": nats})


def halved(runs: SweepRuns) -> ListedRuns:
    return ListedRuns(runs, Study("asha", runs.varied, "--prune asha"))


def test_the_best_third_of_those_that_came_as_far_goes_on(tmp_path: Path) -> None:
    source = halved(runs := listed(tmp_path, 5))
    one, two, three, four, five = runs.runs
    assert judge(source, one, 10, 5.0) == ""  # no other run came as far
    printed = judge(source, two, 20, 6.0)
    assert printed == "not among the best third of 2 at validation 1 (step 20; ASHA)"
    assert judge(source, three, 10, 4.0) == ""
    assert judge(source, four, 10, 4.5) != "" and judge(source, five, 10, 4.7) != ""
    assert judge(source, one, 20, 9.0) == ""  # the 2nd validation ends no run
    assert judge(source, three, 20, 9.0) == ""
    assert judge(source, one, 30, 3.0) == ""
    assert "best third of 2 at validation 3 (step 30" in judge(source, three, 30, 3.5)


@pytest.mark.filterwarnings("error")
def test_a_validation_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    source = halved(runs := listed(tmp_path, 2))
    one, two = runs.runs
    for _ in range(5):
        assert judge(source, one, 10, 2.0) == ""
    assert "of 2 at validation 1" in judge(source, two, 10, 3.0)
    assert judge(source, one, 20, 2.0) == judge(source, one, 20, 2.0) == ""
    assert judge(source, one, 30, 9.0) == "", "it is the 3rd"


def test_equals_stay_together(tmp_path: Path) -> None:
    source = halved(runs := listed(tmp_path, 6))
    assert not any(judge(source, run, 1, 1.0) for run in runs.runs)


def test_a_halved_list_goes_on_after_a_kill(tmp_path: Path) -> None:
    source = halved(runs := listed(tmp_path, 4))
    one, two, three, _ = runs.runs
    for run, nats in ((one, 2.0), (two, 3.0), (three, 1.0)):
        run.folder.mkdir()
        line = json.dumps({"step": 10, "valid_mlm_per_character": nats})
        (run.folder / "metrics.jsonl").write_text(f"{line}\n{line[:9]}")
        if why := judge(source, run, 10, nats):
            run.state, run.problem = "pruned", why
    runs.write()
    again = halved(runs := listed(tmp_path, 4))
    one, two, three, four = runs.runs
    assert two.state == "pruned" and "at validation 1" in two.problem
    assert [again.next() for _ in range(4)] == [one, three, four, None]
    assert judge(again, four, 10, 1.5) != ""


def test_pruning_without_optuna_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name)
    )
    words = ("--store", tmp_path / "s.zarr", "--lr", "0.1", "--lr", "0.2")
    for more, printed in (("--prune asha", "--prune asha needs"), ("--trials 2", "--trials needs")):
        line = refused(student_sweep, *words, *more.split())
        says(line, f"{printed} optuna", "pip install 'teachonce[tune]'")


def test_a_student_that_nothing_compares(tmp_path: Path) -> None:
    space: Space = {"vocab": ("5k", "10k")}
    trials, runs = started(tmp_path, 1, space)
    run = trials.next()
    assert run is not None
    said: list[str] = []
    Execution(trials, runs, (), "", said.append).end(run, "finished", {"valid_loss": 2.0}, "")
    assert "or add mlm to --loss (masked LMs only)" in run.problem
    assert said == [f"[1] trained; {run.problem}"]


KNOWN = ["lr", "loss", "vocab", "steps", "best", "recipe", "student"]


def test_a_grid(tmp_path: Path) -> None:
    text = 'lr = [0.1, "3e-4"]\nloss = ["mlm", ["mlm=1", "kl=2"]]\nbest = true'
    space = read_space(_written(tmp_path, text), KNOWN)
    assert space == {"lr": (0.1, 3e-4), "loss": ("mlm", "mlm=1,kl=2"), "best": (True,)}
    assert varied(space) == ["lr", "loss"]
    assert len(list(points(space))) == 4
    given = overridden(space, {"lr": (0.5,), "vocab": ("5k", "10k"), "steps": ()})
    assert given == {"lr": (0.5,), "vocab": ("5k", "10k"), "loss": space["loss"], "best": (True,)}


def test_a_setting_given_twice_is_one_student(tmp_path: Path) -> None:
    space = read_space(_written(tmp_path, 'lr = [0.1, 0.3, "1e-1"]'), KNOWN)
    assert space == {"lr": (0.1, 0.3)}
    given = overridden(space, {"vocab": ("5k", "10k", "5k")})
    assert given == {"lr": (0.1, 0.3), "vocab": ("5k", "10k")}


def test_ranges(tmp_path: Path) -> None:
    text = """
lr = {low = 1e-4, high = 1, log = true}
vocab = {low = 500, high = 5000}
loss = {mlm = 1, kl = {low = 0.5, high = 2}}
"""
    space = read_space(_written(tmp_path, text), KNOWN)
    assert space["lr"] == Interval(1e-4, 1, True, False)
    assert space["vocab"] == Interval(500, 5000, False, True)
    assert varied(space) == ["lr", "vocab", "loss"]
    ends = list(corners(space))
    assert len(ends) == 4 and ends[0]["lr"] == 1e-4
    assert arguments_of(ends[-1]) == {"lr": 1e-4, "vocab": 500, "loss": "mlm=1,kl=2"}
    with pytest.raises(UserError, match="lr: a range needs --trials N"):
        list(points(space))
    assert overridden(space, {"loss": ("mlm",)}).keys() == {
        "loss",
        "lr",
        "vocab",
    }  # without weights


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = [0.1", "not TOML"),
        ("", "has no settings"),
        ("rate = [0.1]", "unknown key 'rate'"),
        ("lr = []", "lr: an empty list"),
        ('lr = ["quick"]', "lr: 'quick': expected a number, such as"),
        ("lr = [-1.0]", "--lr -1: expected"),
        ("lr = {low = 1, high = 0}", "low less than high"),
        ("lr = {low = 0, high = 1, log = true}", "low above 0"),
        ("lr = {from = 1, to = 2}", "expected a list, or a range"),
        ('student = {low = 1, high = "9"}', "expected a list, or a range"),
        ("loss = {mlm = 1, wishful = 1}", "wishful"),
    ],
)
def test_what_is_no_space(tmp_path: Path, text: str, message: str) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_space(path, KNOWN)
    assert str(path) in str(error.value) and message in str(error.value)


def _written(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path
