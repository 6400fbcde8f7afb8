"""The commands as users type them."""

from __future__ import annotations

import errno
import io
import json
import operator
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from transformers import AutoModel

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.student_export.cli import main as student_export
from teachonce.student_predict.cli import main as student_predict
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.start import initialise
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.sweep.table import aligned, table
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.corpus import sources
from teachonce.teacher_dump.mixed_vocab.cli import mixed_vocab
from tests.end_to_end.support import ROOT, STUDENT, Words, invoke, ok, refused, report_of, says
from tests.making.dumps import write_corpus
from tests.making.models import Stores, Teachers


@pytest.fixture(scope="module")
def store(tiny_store: Stores) -> Path:
    return tiny_store("bert", attention="none")


MODULES = ("teacher_dump.cli", "student_train.cli", "student_train.sweep", "feature_store.cli")
HELP = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(f"teachonce.{module}").main(["--help"])
    except SystemExit as end:
        print(end.code, {"torch", "transformers"} & set(sys.modules))
"""


def test_help_loads_no_torch() -> None:
    call = [sys.executable, "-c", HELP, *MODULES]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("0 set()\n") == len(MODULES)


COMMANDS: list[tuple[click.Command, tuple[str, ...]]] = [
    (command, ())
    for command in (teacher_dump, student_train, student_sweep, downstream, feature_store)
] + [(teacher_dump, ("mixed-vocab",))]
COMMANDS += [(feature_store, (name,)) for name in ("info", "verify", "convert", "merge", "show")]


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_help_is_short_or_long(command: click.Command, words: tuple[str, ...]) -> None:
    short, long = (ok(command, *words, option) for option in ("-h", "--help"))
    assert short == long and "-h, --help" in short
    assert "..." not in short.partition("Commands:")[2]  # each in one short sentence


def test_sweep_tells_the_defaults_of_its_repeatable_options() -> None:
    context = click.Context(student_sweep)
    records = [param.get_help_record(context) for param in student_sweep.params]
    printed = " ".join(record[1] for record in records if record)
    assert "[default: tiny; for a causal teacher" in printed
    assert "1 for adadelta; a tenth with --student DIR without --lora]" in printed
    assert "[default: STORE-sweep next to STORE.zarr]" in printed


@pytest.mark.parametrize(
    "command",
    [
        *(teacher_dump, student_train, student_sweep, student_export, student_predict, downstream),
        *(feature_store, mixed_vocab, feature_store.commands["info"]),
    ],
)
def test_version(command: click.Command) -> None:
    assert ok(command, "--version").strip().endswith(version("teachonce"))


def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    write_corpus(tmp_path / "texts.txt", 5)
    (tmp_path / "scan.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty.txt").touch()
    words = ("--model", tiny_teacher("bert"), "--corpus", tmp_path, "--out", tmp_path / "a.zarr")
    said = ok(teacher_dump, *words)
    line = f"skipped   {tmp_path / 'empty.txt'}; {tmp_path / 'scan.pdf'}: empty, or of a suffix"
    assert line in said and "texts.txt" not in said


def test_dump_without_a_head_says_what_is_stored(tmp_path: Path, tiny_teacher: Teachers) -> None:
    model, out = shutil.copytree(tiny_teacher("bert"), tmp_path / "headless"), tmp_path / "a.zarr"
    AutoModel.from_pretrained(model).save_pretrained(model)
    words = ("--model", model, "--corpus", write_corpus(tmp_path / "a.txt", 5), "--out", out)
    said = ok(teacher_dump, *words)
    assert "logits none (no masked-LM head in the checkpoint), hidden mean" in said
    assert "topk" not in said and open_store(out).features.logits is None
    out = tmp_path / "b.zarr"
    said = ok(teacher_dump, *words[:-1], out, "--head", "none", "--attention", "none")
    assert "logits none (--head none), hidden mean, attention none" in said


def test_dump_without_a_corpus_takes_the_docs_of_python_and_says_so(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses a part of the library here; test_sources.py reads all of it."""
    some = [each for each in sources.library_sources() if each[1].parent.name == "json"]
    monkeypatch.setattr(sources, "library_sources", lambda: some)
    out = tmp_path / "store.zarr"
    said = ok(teacher_dump, "--model", tiny_teacher("bert"), "--out", out, "--limit", "1500")
    assert "python-docs (no --corpus given: the default)" in said
    assert "logits topk:64, hidden mean, attention mean, 1 view, windows of at most 128" in said
    calibrated = "are read to measure the mean and standard deviation of the states"
    assert f"tokens of the first part {calibrated}\n" in said
    assert "part 0    " in said and "tokens/s" in said  # no terminal, so a line for each part
    assert said.strip().endswith(f"next: student-train --store {out} --vocab 5k")
    store = open_store(out)
    assert 1000 < store.meta["tokens"] <= 1500
    assert store.identity["corpus"]["sources"][0]["kind"] == "python-docs"
    assert store.features.codec == "default" and store.features.hidden == ("mean",)


def test_a_training_in_a_pipe_tells_how_far_it_is_at_each_validation(
    store: Path, tmp_path: Path
) -> None:
    words = ("--store", store, "--vocab", "450", "--steps", 9, "--eval-every", 3, *STUDENT)
    said = ok(student_train, *words, "--out", tmp_path / "student")
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    form = r"step +{} of 9: loss [\d.]+, valid_loss [\d.]+; [\d,]+ student tokens/s, [\d:]+ left"
    assert all(re.fullmatch(form.format(n), x) for n, x in zip((3, 6), lines, strict=True))


def test_student_without_out_goes_beside_the_store(store: Path) -> None:
    said = ok(student_train, "--store", store, "--vocab", "450", "--steps", "2", *STUDENT)
    (folder,) = (store.parent / "store-students").iterdir()
    assert f"out       {folder}" in said and f"student in {folder}" in said
    assert f"next: student-predict {folder} 'This is a [MASK].'" in said
    assert folder.name.startswith("450-32x2x4-")
    says(said, "vocabulary 450", "start auto", "pieces (SVD to 32)", "1 mlm + 30 hidden")
    says(said, "2 steps", "lr 0.004")
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md", "metrics.jsonl"} <= files


NATS = "valid_mlm_per_character"


def table_of(run: Path, out: Path) -> str:
    assert "nats/character" in ok(downstream, "--task", "table", run, "--out", out)
    return (out / "scores.json").read_text()


@pytest.mark.slow
def test_sweep(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def counted(student: Any, how: str, *others: Any) -> list[str]:
        starts.append(how)
        return initialise(student, how, *others)

    monkeypatch.setattr("teachonce.student_train.prepared_student.initialise", counted)
    out = store.parent / "store-sweep"  # the destination without --out
    words: Words = ("--store", store, *STUDENT, "--steps", "2", "--eval-every", "2")
    words += ("--vocab", "450", "--vocab", "500", "--loss", "mlm=1", "--loss", "mlm=1,kl=1")
    said = ok(student_sweep, *words)
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["| vocab", "loss"] and len(rows) == 2 + 4
    assert sorted(tuple(row[:2]) for row in rows[2:]) == sorted(
        (f"| {vocab}", loss) for vocab in (450, 500) for loss in ("mlm=1", "mlm=1,kl=1")
    )
    assert len(json.loads((out / "sweep.json").read_text())) == 4
    weights = {path: path.stat().st_mtime_ns for path in out.glob("*/model.safetensors")}
    assert len(weights) == 4
    assert len(starts) == 4  # no run is prepared once for the checks and again for training

    again = ok(student_sweep, *words, "--cache", "ram")  # which does not change the student
    assert again.count("finished before") == 4
    assert [line for line in again.splitlines() if line.startswith("| ")] == [
        line for line in said.splitlines() if line.startswith("| ")
    ]
    assert weights == {path: path.stat().st_mtime_ns for path in weights}

    by_nats = sorted(json.loads((out / "sweep.json").read_text()), key=operator.itemgetter(NATS))
    headings = [heading.strip("| ") for heading in rows[0]]
    shown = [row[headings.index(NATS)].strip(" |") for row in rows[2:]]
    assert shown == [f"{row[NATS]:,.5g}" for row in by_nats]  # the best first
    assert "valid_loss" not in headings  # with other losses, so another quantity
    best = f"best      {by_nats[0]['folder']}: {NATS} {by_nats[0][NATS]:.5g} (nats per character,"
    assert best in said and "comparable between vocabularies and losses" in said
    joined = json.loads(table_of(out, out.parent / "joined"))["rows"]
    assert [row["model"] for row in joined] == [str(out / row["folder"]) for row in by_nats]
    assert joined[0]["mean"]["held-out"] == {"nats/character": by_nats[0][NATS]}
    assert json.loads(invoke(student_sweep, *words, "--json").stdout) == by_nats
    (out / "sweep.json").write_text("[]")  # as a sweep begins
    line = refused(downstream, "--task", "table", out)
    assert "none of its students is finished; run the same student-sweep again" in line
    (out / "sweep.json").write_text("[3]")
    line = refused(downstream, "--task", "table", out)
    assert "sweep.json was not written by student-sweep" in line


def test_a_sweep_over_a_flag(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--store", store, *STUDENT, "--vocab", "450", "--loss", "mlm", "--steps", "2")
    for given, expected in (("--best", [True]), ("--no-best --best", [False, True])):
        said = ok(student_sweep, *words, "--out", tmp_path, *given.split())
        rows = json.loads((tmp_path / "sweep.json").read_text())
        reports = [report_of(tmp_path / r["folder"]) for r in rows]
        assert [report["settings"]["best"] for report in reports] == expected
    assert [row["best"] for row in rows] == ["False", "True"]
    assert said.count("finished before") == 1
    line = refused(student_sweep, *words, "--out", tmp_path, "--no-best")
    assert f"{tmp_path}: its table has 1 student with other settings" in line
    assert "give another --out" in line

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    line = refused(student_sweep, *words, "--out", tmp_path, "--no-best", "--best")
    assert "No space left" in line
    assert json.loads((tmp_path / "sweep.json").read_text()) == rows  # complete and unchanged


def test_the_table_of_a_sweep_at_a_terminal() -> None:
    rows = [
        {"loss": "mlm=1", "parameters": 1234567, "valid_mlm_per_character": 1.25},
        {"loss": "mlm=1,hidden=30", "parameters": 7, "valid_mlm_per_character": 0.5},
    ]
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, no_color=True, width=60)
    console.print(aligned(table(rows, ["loss"])))
    *_, one, two = said.getvalue().splitlines()
    assert one.split() == ["mlm=1", "1,234,567", "1.25"]
    assert two.split() == ["mlm=1,hidden=30", "7", "0.5"]
    ends = [[cell.end() for cell in re.finditer(r"\S+", line)] for line in (one, two)]
    assert ends[0][1:] == ends[1][1:] and ends[0][0] < ends[1][0]


def test_feature_store(store: Path, tmp_path: Path) -> None:
    printed = ok(feature_store, "info", store)
    fs = open_store(store)
    for word in ("bert", f"{fs.meta['tokens']:,}", "topk", "mean", "default"):
        assert word in printed
    described = json.loads(ok(feature_store, "info", store, "--json"))
    assert described["tokens"] == fs.meta["tokens"] and described["identity"] == fs.identity
    assert "sound" in ok(feature_store, "verify", store)
    shown = ok(feature_store, "show", store, "3")
    assert fs[3].text.split()[0] in shown and "sequence 3" in shown

    ok(feature_store, "convert", store, tmp_path / "copy.h5")
    ok(feature_store, "convert", tmp_path / "copy.h5", tmp_path / "small.zarr", "--codec", "small")
    assert "sound" in ok(feature_store, "verify", tmp_path / "small.zarr")
    copy = open_store(tmp_path / "copy.h5")
    assert list(copy.texts()) == list(fs.texts()) and copy.identity == fs.identity
    for name, states in fs[3].views[0].hidden.items():
        assert (copy[3].views[0].hidden[name] == states).all()
    words = ("--store", tmp_path / "small.zarr", "--vocab", "450", "--steps", "2", *STUDENT)
    ok(student_train, *words, "--out", tmp_path / "student")
