"""`student-sweep`: lists of a file, runs that fail, a search, several processes, scores."""

import csv
import json
import os
import re
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from teachonce.downstream.cli import main as downstream
from teachonce.downstream.early_checks import check_tables
from teachonce.store import open_store
from teachonce.student_train.plan import train_plan
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep import job, processes, scores
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.sweep.execution import Work
from teachonce.student_train.sweep.runs import SweepRuns
from teachonce.student_train.sweep.scores import ScoringPlan, ScoringTask
from teachonce.support.errors import UserError
from tests.end_to_end.support import ROOT, STUDENT, Words, invoke, ok, refused, says, start
from tests.end_to_end.test_resume import wait_for
from tests.making.models import Teachers
from tests.support.leased import held

SMALL = (*STUDENT, "--vocab", "450", "--steps", "2")
CLASSIFY = "[tasks.mood]\ntask = 'classify'\ntrain = 'table.tsv'\ndev = "
DIVERGING = "lr = [0.001, 1e30]\nloss = {mlm = 1}\nvocab = 450"


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text("utf-8"))


def states(out: Path) -> list[str]:
    return [run["state"] for run in read(out, "runs.json")["runs"]]


def test_a_student_that_fails_does_not_stop_the_others(tmp_path: Path, store: Path) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "out"
    grid.write_text(DIVERGING.replace("[0.001, 1e30]", "[1e30, 0.001]"))
    words = ("--store", store, *SMALL, "--grid", grid, "--out", out)
    for _ in range(2):  # the same command tries the failed run again
        done = invoke(student_sweep, *words)
        assert done.exit_code == 1, done.output
        says(done.stderr, "1 of 2 students failed", "training has diverged", "the same command")
        assert "[1] failed: step" in done.stdout
        assert states(out) == ["failed", "finished"]
    (row,) = read(out, "sweep.json")
    assert row["lr"] == "0.001"
    with (out / "sweep.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["valid_mlm"]) == row["valid_mlm"] and line["folder"] == row["folder"]


def test_a_search(tmp_path: Path, store: Path) -> None:
    pytest.importorskip("optuna")
    grid, out = tmp_path / "grid.toml", tmp_path / "out"
    grid.write_text(
        'lr = {low = 1e-4, high = 1e-2, log = true}\nloss = [["mlm"], ["mlm", "kl=0.5"]]'
    )
    words = ("--store", store, *SMALL, "--grid", grid, "--out", out)
    first = ok(student_sweep, *words, "--trials", 2)
    assert "[2] lr" in first and states(out) == ["finished"] * 2
    said = ok(student_sweep, *words, "--trials", 3)
    assert said.count("finished before") == 2 and states(out) == ["finished"] * 3
    folder = out / read(out, "runs.json")["runs"][0]["folder"]
    folder.rename(out / f"450-32x2x4-span-mlm1-auto-seed0-{folder.name[-6:]}")  # as named before
    again = ok(student_sweep, *words, "--trials", 3, "--jobs", 2)
    assert again.count("finished before") == 3
    rates = {float(row["lr"]) for row in read(out, "sweep.json")}
    assert len(rates) == 3 and all(1e-4 <= rate <= 1e-2 for rate in rates)
    best = min(read(out, "sweep.json"), key=lambda row: row["valid_mlm_per_character"])
    assert f"best      {best['folder']}" in said


def test_asha_ends_a_student_and_never_begins_it_again(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "out"
    words: Words = ("--store", store, "--student", "bert:32x2x4", *STUDENT[2:], "--vocab", "450")
    words += ("--loss", "mlm", "--out", out)
    words += ("--init", "teacher")  # with this start the larger rate is ahead after one step
    words += ("--steps", 4, "--eval-every", 1, "--lr", 0.01, "--lr", 1e-6, "--prune", "asha")
    said = ok(student_sweep, *words)
    assert states(out) == ["finished", "pruned"]
    says(said, "[2] pruned: not among the best third of 2 at validation 1")
    says(said, "pruned    1 trial of 2")
    again = ok(student_sweep, *words)
    assert states(out) == ["finished", "pruned"] and "[2/2]" not in again


def test_a_sweep_continues_where_auto_is_another_precision(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("--store", store, *SMALL, "--loss", "mlm", "--lr", 0.01, "--lr", 0.001, "--out", out)
    with monkeypatch.context() as other_machine:
        other_machine.setattr("teachonce.training.device._multiplies_bf16", lambda device: True)
        ok(student_sweep, *words)
    first, second = (out / run["folder"] for run in read(out, "runs.json")["runs"])
    report = read(second, "training.json")
    del report["result"]  # as if it had been killed
    (second / "training.json").write_text(json.dumps(report))
    assert ok(student_sweep, *words).count("finished before") == 1
    assert {path for path in out.iterdir() if path.is_dir()} == {first, second}
    assert states(out) == ["finished"] * 2
    assert read(second, "training.json")["settings"]["precision"] == "bf16"


def test_a_folder_has_one_student(tmp_path: Path, store: Path) -> None:
    """Its name hashes the last component of a path, so the full settings are compared."""
    paths = [tmp_path / folder / store.name for folder in ("en", "ru")]
    for path in paths:
        path.parent.mkdir()
        path.symlink_to(store)
    options = TrainOptions(store, out=tmp_path / "out", loss={"mlm": 1.0}, vocab="450")
    en, ru = (replace(options, init=f"svd:{path}").resolved() for path in paths)
    assert en.digest() == ru.digest()
    init = f"init was {en.init} and is {ru.init}"

    def trained(options: TrainOptions) -> dict[str, Any]:
        return Work(options, ()).train([], None, lambda *_: "", print)

    with open_store(store) as opened:
        with pytest.raises(UserError, match=f"two students of this sweep .*{init}"):
            job._check([en, ru], [opened])
        report: dict[str, Any] = {"environments": [], "tokenizer": "", "result": {"steps": 2}}
        report["store"] = {"content": opened.manifest.content()}
        report["settings"] = en.describing()
        (tmp_path / "out").mkdir()
        (tmp_path / "out/training.json").write_text(json.dumps(report))
        for stores in ([opened], []):  # of all students before the first, and of each
            with pytest.raises(UserError, match=f"finished student with other settings: {init}"):
                job._check([ru], stores) if stores else trained(ru)
    assert trained(en) == {"steps": 2}


def test_another_sweep_of_the_folder_is_refused_before_the_stores_are_read_again(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words: Words = ("--store", store, *SMALL, "--out", out)

    opened = list[Any]()

    def noted(path: Any, **how: Any) -> Any:
        opened.append(path)
        return open_store(path, **how)

    monkeypatch.setattr(train_plan, "open_store", noted)
    rates: Words = ("--lr", 1e-3, "--lr", 2e-3, "--lr", 3e-3)
    with held(out):
        line = refused(student_sweep, *words, *rates)
    says(line, f"{out}: another `student-sweep` is writing")
    assert len(opened) == 1  # for the checks of all students
    assert not out.exists()


NO_TASKS: list[tuple[str, ...]] = [
    ("", "expected tables [tasks.NAME]"),
    ("[tasks.mood]\ntask = 'speed'\n[models]\nteacher = 3", "models: expected a table"),
    ("[tasks.mood]\nkind = 1", 'expected task = "classify"'),
    ("[tasks.mood]\ntask = 'clasify'", "[tasks.mood] task clasify: did you mean classify?"),
    ("[tasks.mood]\ntask = 'classify'\nwarm-up = 1", "warm-up is not an option", "warmup?"),
    ("[tasks.mood]\ntask = 'classify'\nmodel = 'x'", "model is not an option", "sweep sets"),
    ("[tasks.mood]\ntask = 'speed'\nseed = 'one'", "[tasks.mood] seed one: 'one': expected"),
    (
        "[tasks.mood]\ntask = 'ner'\npieces = 'al'",
        "[tasks.mood] pieces al: ",
        "did you mean all? expected one of first, all",
    ),
    ("[tasks.mood]\ntask = 'speed'\nrepeat = true", "[tasks.mood] repeat true: expected"),
    ("[tasks.mood]\ntask = 'ner'\nsave = 3", "[tasks.mood] save 3: expected true or false"),
    ("[tasks.text]\ntask = 'mlm'\ntrain = 'novels.txt'\nvocab = '1k'", "[tasks.text] vocab"),
    ("[tasks.mood]\ntask = 'table'", "[tasks.mood] task table does not take model"),
    ("[tasks.mood]\ntask = 'classify'", "[tasks.mood] task classify needs train, or as_is"),
    (f"{CLASSIFY}'gone.tsv'", "[tasks.mood] dev gone.tsv: no such file or folder"),
    (f"{CLASSIFY}'novels.txt'", "[tasks.mood] dev novels.txt: expected a file that ends in"),
    (f"{CLASSIFY}'table.tsv'\nlabel_column = 'x'", "[tasks.mood] train table.tsv, ", "column 'x'"),
    (
        f"{CLASSIFY}'table.tsv'\n[models]\nteacher = 'my-techer'",
        "[models] teacher: model 'my-techer': no such folder",
        "did you mean my-teacher?",
    ),
]


def refused_here(tasks: Any, models: Any) -> str:
    """Check the tables as a process of a sweep does. One test checks its start."""
    try:
        check_tables(tasks, models)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", NO_TASKS)
def test_tasks_that_are_none(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if case is not NO_TASKS[-1]:
        monkeypatch.setattr(scores, "_refused", refused_here)
    (tmp_path / "my-teacher").mkdir()
    (tmp_path / "novels.txt").write_text("A long night.\n")
    (tmp_path / "table.tsv").write_text("text\tlabel\nA good one.\tgood\n")
    file = tmp_path / "tasks.toml"
    file.write_text(case[0])
    words = ("--store", store, *SMALL, "--out", tmp_path / "out", "--downstream", file)
    says(refused(student_sweep, *words), str(file), *case[1:])
    assert not (tmp_path / "out").exists()


@pytest.mark.apart
def test_several_at_once_that_are_scored(
    tmp_path: Path, store: Path, tiny_teacher: Teachers
) -> None:
    rows = [f"{mood} {n} day\t{mood}" for n in range(20) for mood in ("good", "bad")]
    (tmp_path / "moods.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    tasks, grid, out = tmp_path / "tasks.toml", tmp_path / "grid.toml", tmp_path / "out"
    file = json.dumps(str(tmp_path / "moods.tsv"))
    tasks.write_text(
        f'[tasks.mood]\ntask = "classify"\ntrain = {file}\ndev = {file}\nseeds = 2\nepochs = 1\n'
        '[tasks.speed]\ntask = "speed"\n'
        f"[models]\nteacher = {json.dumps(str(tiny_teacher('bert')))}\n"
    )
    grid.write_text(DIVERGING.replace("1e30", "0.002, 1e30"))
    words = ("--store", store, *SMALL, "--grid", grid, "--out", out, "--downstream", tasks)
    done = invoke(student_sweep, *words, "--jobs", 2)
    says(done.stderr, "1 of 3 students failed", "training has diverged")
    assert states(out) == ["finished", "finished", "failed"]
    for row in read(out, "sweep.json"):
        mood, speed = row["scores"]["mood"], row["scores"]["speed"]
        assert 0 <= mood["accuracy"] <= 100 and "accuracy deviation" in mood
        assert speed["disk_bytes"] > 0 and speed["cpu sentence_ms"] > 0
    assert read(out, "runs.json")["references"]["teacher"].keys() == {"mood", "speed"}
    assert "| model | mood accuracy |" in done.stdout and "| teacher | " in done.stdout
    joined = json.loads(ok(downstream, "--task", "table", out, "--json"))["rows"]
    assert [row["task"] for row in joined].count("classify") == 3  # two students, the teacher
    again = invoke(student_sweep, *words)  # scored students are not scored again
    assert again.output.count("finished before") == 2 and "scores  " not in again.output
    assert len(read(out, "sweep.json")) == 2 and "mood accuracy" in again.stdout


SCORED = {
    "measures": {"right": "accuracy"}, "mean": {"dev": {"accuracy": 0.5}}, "seeds": [{}],
    "scale": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "figures"),
    (
        ({"model": "/models/bert-tiny", **SCORED}, {"right": 50.0}),
        (
            {"models": [{"model": "/models/bert-tiny", "disk_bytes": 7}], "devices": []},
            {"disk_bytes": 7},
        ),
    ),
    ids=("classify", "speed"),
)
def test_scores_of_a_reference_model_are_its_own(
    tmp_path: Path, scores: dict[str, Any], figures: dict[str, float]
) -> None:
    """In an earlier sweep its name in [models] may belong to another model."""
    task, runs = ScoringTask("mood", ("--seeds", "1")), SweepRuns(tmp_path, {}, [], searched=False)
    folder = task.folder(tmp_path, "teacher")
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps(scores))
    same, other = (ScoringPlan((task,), {"teacher": f"/models/bert-{n}"}) for n in ("tiny", "base"))
    assert job._references(same, runs, print) == []
    assert runs.references == {"teacher": {"mood": figures}}
    (line,) = job._references(other, runs, print)
    says(line, f"{folder}: has the scores of /models/bert-tiny", "teacher is /models/bert-base")
    assert runs.references == {"teacher": {}}


@pytest.mark.slow
def test_a_student_whose_scoring_fails_is_trained(tmp_path: Path, store: Path) -> None:
    tasks, out = tmp_path / "tasks.toml", tmp_path / "out"
    (tmp_path / "one.tsv").write_text("text\tlabel\nA good one.\tgood\n")
    file = json.dumps(str(tmp_path / "one.tsv"))
    tasks.write_text(f'[tasks.mood]\ntask = "classify"\ntrain = {file}\ndev = {file}\n')
    words = ("--store", store, *SMALL, "--loss", "mlm", "--out", out, "--downstream", tasks)
    done = invoke(student_sweep, *words)
    assert done.exit_code == 1, done.output
    says(done.stdout, "[1] trained; its scoring failed: task mood: --train: every label is 'good'")
    says(done.stderr, "1 of 1 student is trained but not scored, the first of them")
    assert "student failed" not in done.output and states(out) == ["finished"]


@pytest.mark.parametrize(
    ("visible", "gpu", "own"), [("2,3", 1, "3"), ("3", 0, "3"), (None, 1, "1")]
)
def test_a_child_sees_one_of_the_gpus_that_its_parent_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int, own: str
) -> None:
    """`in_child` runs in this process, which stays in its group and has no parent."""
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(processes, "_exit_with_parent", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ours, theirs = Pipe()
    processes.in_child(Work(TrainOptions(store=tmp_path / "no.zarr"), ()), gpu, theirs)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    says(ours.recv()[3], "no.zarr: no such file or folder")


@pytest.mark.apart
def test_processes_that_are_stopped(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "out"
    words: Words = ("--store", store, *STUDENT, "--vocab", "450", "--loss", "mlm", "--out", out)
    words += ("--steps", 60, "--eval-every", 5, "--lr", "0.001", "--lr", "0.002", "--jobs", 2)
    sweep = start("teachonce.student_train.sweep", *words)
    wait_for(lambda: len(list(out.glob("*/metrics.jsonl"))) == 2, 600)
    sweep.send_signal(signal.SIGINT)
    said = sweep.communicate(timeout=600)[1]
    assert sweep.returncode == 130 and said.splitlines()[-1].startswith("Stopped: "), said
    assert "leaked" not in said
    assert not children_of(out)
    assert len({path.parents[1] for path in out.glob("*/checkpoints/step-*.pt")}) == 2

    sweep = start("teachonce.student_train.sweep", *words)
    wait_for(lambda: len(children_of(out)) == 2, 600)
    sweep.kill()
    wait_for(lambda: not children_of(out), 600)  # they notice the parent's end, and save themselves
    done = invoke(student_sweep, *words[:-2])
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"resume    after step \d+", done.output)) == 2
    assert states(out) == ["finished"] * 2


def children_of(out: Path) -> list[str]:
    """Return the processes that write a student of `out`, with open metrics or a lease."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            held = [os.readlink(each) for each in (process / "fd").iterdir()]
            if any(path.startswith(str(out)) for path in held):
                found.append(process.name)
    return found
