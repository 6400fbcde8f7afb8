"""The miniatures of the sources: their mechanism with a tiny teacher, their words, their data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import latency
from benchmarks.common import processes
from benchmarks.quality import tagger_sizes
from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import arms, examples, orderings
from benchmarks.reproduce.arms import OURS, SIZES, Arm, Reproduction, Source, Task
from benchmarks.reproduce.examples import CHOSEN, SCORED, Data
from benchmarks.reproduce.papers import SOURCES
from benchmarks.reproduce.task_teachers import PER_CLASS, few_labels, few_tags
from downstream.cli import main as score
from downstream.options import AS_IS, Asked
from store.format.features import TaskSpec
from student_train.arguments import options_from
from student_train.cli import main as student_train
from student_train.settings.shapes import parse_student
from student_train.settings.stages import stages_of
from support.errors import UserError
from support.options import scoped
from tests.downstream.test_bilstm import saved
from tests.end_to_end.support import dumped, ok, refused, write_corpus
from tests.teacher_dump.windows.test_label_numbers import TAGS
from tests.texts import ENGLISH, RUSSIAN

WORDS = ("--student", "bilstm:8,8", "--vocab", "300", "--device", "cpu", "--steps", "2")
PARTS = ("train", "dev", "test")


def in_this_process(module: str, *words: str | Path, jobs: int = 1) -> None:
    ok(import_module(module).main, *words)


def test_arms_are_trained_scored_and_judged(
    tmp_path: Path, tiny_teacher: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "in_own_process", in_this_process)
    lines = []
    for text in (ENGLISH + RUSSIAN) * 2:
        lines += [f"{word}\t{TAGS[0]}" for word in text.split()] + [""]
    corpus, model = tmp_path / "corpus.tsv", tiny_teacher("bert", "tagging", TAGS)
    corpus.write_text("\n".join(lines) + "\n", "utf-8")

    def prepare(work: Path, size: str) -> tuple[list[Path], Path]:
        stores = [work / "a.zarr", work / "b.zarr"]
        for store in stores:
            if not store.exists():
                options = {"head": "tagging", "logits": None, "hidden": "layer:4"}
                dumped(model, corpus, store, **options)
        return stores, model

    one = tmp_path / "de.tsv"
    one.write_text("\n".join(lines[: lines.index("")]) + "\n", "utf-8")
    words = ("--task", "pos", "--test", str(corpus), "--as-is")
    source = Source(
        title="a",
        settings={"small": "s"},
        words={"small": WORDS},
        tasks={"small": [Task("macro F1", words), Task("mean", (*words, "--test", str(one)))]},
        arms={
            "tags": Arm(("--recipe", "tinymbert-d0")),
            OURS: Arm(
                ("--recipe", "tinymbert-d2", "--data", "all", "--vocab", "{work}/tags-0"), (0, 1)
            ),
            "large": Arm(("--nonsense",), sizes=("full",)),
        },
        orderings=[(OURS, "tags", "logits help"), ("large", "tags", "size helps")],
        best="tags",
        prepare=prepare,
        published={"tags": "71.3"},
        published_measure="F1",
    )
    work = tmp_path / "a"
    small = Reproduction(source, work, 1, "small")
    scores = small.scores()
    assert 0 < small.minutes() < 10
    assert list(scores) == ["teacher", "tags", OURS]
    assert {tuple(found) for found in scores.values()} == {("macro F1", "corpus", "de", "mean")}
    for found in scores.values():
        assert found["corpus"] == found["macro F1"]
        assert found["mean"] == pytest.approx([(found["corpus"][0] + found["de"][0]) / 2])
    other = replace(source, words={"small": (*WORDS, "--lr", "1e-3")})
    with pytest.raises(UserError, match="work of other settings, told in settings.txt"):
        Reproduction(other, work, 1, "small").scores()
    said = orderings.ordering_table(source, scores)
    assert "| teacher |" in said and f"| {OURS} | --recipe tinymbert-d2" in said
    assert (
        "| published |" in said
        and "\n\nPublished: F1." in said
        and "| 71.3 |" in said
        and "100%" in said
    )
    assert "- logits help: " in said and "of 1 seeds)" in said and "size helps" not in said
    assert "| de | mean |" in said and " in mean (" in said and " in de (" not in said
    learnt = json.loads((work / f"{OURS}-0/training.json").read_text())
    assert [Path(other).name for other in learnt["settings"]["others"]] == ["b.zarr"]
    (one_task,) = source.tasks["small"][1:]
    apart = replace(
        source, tasks={"small": [one_task]}, joined={"both": {"corpus": "tags", "de": OURS}}
    )
    rows = Reproduction(apart, work, 1, "small").scores()
    assert list(rows) == ["teacher", "both"]
    (of_corpus,), (of_de,) = scores["tags"]["corpus"], scores[OURS]["de"]
    assert rows["both"] == {
        "corpus": [of_corpus], "de": [of_de], "mean": [pytest.approx((of_corpus + of_de) / 2)]
    }  # fmt: skip
    assert "| both | --recipe tinymbert-d0 |" in orderings.ordering_table(apart, rows)
    before = (work / "tags-0/model.safetensors").stat().st_mtime_ns
    compared = orderings.compare_best({"a": source}, tmp_path, 1, "small")
    assert "| a | tags | macro F1 |" in compared and "- a, ours is better: " in compared
    for name in ("ALL", "SOURCES"):
        monkeypatch.setattr(reproduce, name, {"a": source})
    results = tmp_path / "RESULTS.md"
    options = ("--work", tmp_path, "--seeds", "1", "--results", results)
    ok(reproduce.main, "all", *options)
    titles = [line for line in results.read_text().splitlines() if line.startswith("## ")]
    assert titles == ["## a", "## Our recipe against those of the sources"]
    assert (work / "tags-0/model.safetensors").stat().st_mtime_ns == before
    assert "there are a, best, all" in refused(reproduce.main, "b", *options)


def test_a_command_that_fails_ends_all() -> None:
    processes.in_own_process("downstream.cli", "--help")
    with pytest.raises(UserError, match="downstream.cli --task nonsense: ended with exit code 2"):
        processes.in_own_process("downstream.cli", "--task", "nonsense")


def test_an_ordering_is_decided_by_more_than_the_deviation() -> None:
    arms = {"a": [0.6, 0.61, 0.62], "b": [0.5, 0.51, 0.52], "c": [0.4, 0.6, 0.8]}
    claims = [("a", "b", "1"), ("b", "a", "2"), ("c", "b", "3")]
    tasks = {"small": [Task("F1", ())]}
    source = Source("", {}, {}, tasks, {}, claims, "a", lambda work, size: ([], work))
    scores = {name: {"F1": values} for name, values in arms.items()}
    said = orderings.ordering_table(source, {"teacher": {"F1": [1.0]}, **scores})
    assert "- 1: holds in F1 (a 0.610, b 0.510; better with 3 of 3 seeds)" in said
    assert "- 2: does not hold in F1" in said and "- 3: not decided in F1" in said
    assert "0.610 ± 0.010 | 61% |" in said


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return dumped(tiny_teacher("bert"), write_corpus(folder / "a.txt", 5), folder / "plain.zarr")


@pytest.mark.parametrize(("name", "size"), [*itertools.product(SOURCES, SIZES)])
def test_all_words_of_a_source_are_understood(name: str, size: str, plain: Path) -> None:
    source = SOURCES[name]
    there = {arm for arm, settings in source.arms.items() if size in settings.sizes}
    assert {source.best, OURS} <= there and source.settings[size]
    rows = {*source.arms, *source.joined}
    assert set(source.published) <= {*rows, "teacher"}
    for better, worse, _ in source.orderings:
        assert {better, worse} <= rows
    for parts in source.joined.values():
        assert set(parts.values()) <= there
    for arm in there:
        words = ["--store", str(plain), *source.words[size], *source.arms[arm].words]
        options = options_from(given(student_train, words))
        stages_of(options, parse_student(options.student).layers)
    for task in source.tasks[size]:
        found = given(score, [*task.words, "--model", "m", "--out", "o"])
        taken, as_is = scoped(Asked, found["task"]), scoped(Asked, AS_IS)
        known = taken & as_is if found.get("as_is") else taken - {"as_is"}
        assert found.keys() <= known | {"task"}


def given(command: click.Command, words: list[str]) -> dict[str, Any]:
    """What a command reads of these words, without what they leave at its default."""
    context = command.make_context("a", [word.replace("{seed}", "0") for word in words])
    default = click.core.ParameterSource.DEFAULT
    return {n: v for n, v in context.params.items() if context.get_parameter_source(n) != default}


@pytest.mark.parametrize("separate", [True, False])
def test_examples_are_cut_into_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    monkeypatch.setattr(examples, "DATA", tmp_path)
    rows = [f"{number}\t{number % 2}" for number in range(2000)]
    (tmp_path / "a.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    by_label = [f"{number}\t{number // 5500}" for number in range(5000, 6000)]
    (tmp_path / "b.tsv").write_text("\n".join(["text\tlabel", *by_label]) + "\n")
    data = Data("F1", "cut", "classify", "a.tsv", "b.tsv" if separate else "", few=300)
    data.cut(tmp_path, "small")
    found = {part: (tmp_path / f"cut.{part}.tsv").read_text().splitlines() for part in PARTS}
    assert all(lines.pop(0) == "text\tlabel" for lines in found.values())
    assert {line[-1] for line in found["test"]} == {"0", "1"}
    expected = (300, CHOSEN["small"], SCORED["small"])
    assert tuple(len(found[part]) for part in PARTS) == expected
    assert len(set(itertools.chain(*found.values()))) == sum(expected)
    data.cut(tmp_path, "full")
    assert (tmp_path / "cut.train.tsv").read_text().count("\n") > 600
    sentences = "\n\n".join(f"a\tO\n{number}\tB-X" for number in range(10))
    (tmp_path / "c.tsv").write_text(f"#\tbook_1\n{sentences}\n")
    Data("F1", "tags", "ner", "c.tsv").cut(tmp_path, "small")
    assert not any("#" in path.read_text() for path in tmp_path.glob("tags.*"))
    assert (tmp_path / "tags.test.tsv").read_text().count("\n\n") == 1  # a fifth: two sentences


def test_few_labels_and_few_tags(tmp_path: Path) -> None:
    rows = [f"text {n}\t{n % 2}" for n in range(1400)]
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    few, dev, all_ = (path.read_text().splitlines() for path in few_labels(table, tmp_path))
    assert len(few) == 1 + 2 * PER_CLASS and len(dev) == 501 and len(all_) == 901
    assert {row for row in all_ if not row.endswith("\t")} == set(few)
    assert not set(dev[1:]) & {row.rpartition("\t")[0] + "\t" for row in all_}
    fewer, _, some = few_labels(table, tmp_path, 5, 20)
    assert len(fewer.read_text().splitlines()) == 11 and len(some.read_text().splitlines()) == 31
    out = few_tags(["a\tO\nb\tB-X", "c\tO"], tmp_path / "few_words.tsv", 1)
    assert out.read_text() == "a\tO\nb\tB-X\n\nc\t\n\n"


def test_sizes_are_scored_and_timed_beside_the_teacher(
    tmp_path: Path,
    tiny_teacher: Callable[..., Path],
    make_tokenizer: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency, "in_own_process", in_this_process)
    student = saved(make_tokenizer("wordpiece"), tmp_path / "s", TaskSpec("tagging", TAGS))
    rows = latency.measured([student], tiny_teacher("bert"), tagger_sizes.SPEED)
    scores = {"teacher": {"F1": [0.9]}, "24,24": {"F1": [0.5, 0.6]}}
    teacher, told = tagger_sizes.sizes_table(scores, rows).splitlines()[2:]
    assert teacher.startswith("| teacher |  | 0.900 |") and "| 1/1.0 |" in teacher
    assert told.startswith("| 24 | 24 | 0.550 ± 0.071 |")
    share = rows[1]["parameters"] / rows[0]["parameters"]
    assert f"| 1/{share:.1f} |" in told


def test_latency_of_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "TEACHER", ("64x4x4", 300))
    monkeypatch.setattr(latency, "STUDENTS", (("16x1x2", 50), ("64x2x4", 300)))
    results = tmp_path / "RESULTS.md"
    ok(latency.main, "--batch-size", 1, "--length", 32, "--results", results)
    rows = [
        line.strip("| ").split(" | ")
        for line in results.read_text().splitlines()
        if line.startswith(("| 64", "| 16"))
    ]
    assert [cells[:2] for cells in rows] == [["64x4x4", "300"], ["16x1x2", "50"], ["64x2x4", "300"]]
    fewer = [float(cells[3]) for cells in rows]
    assert fewer[0] == 1 < fewer[2] < fewer[1]
    assert all(len(cells) == len(latency.HEAD) for cells in rows)
