"""The miniatures of the sources: their mechanism with a tiny teacher, their recipes, their data."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import reproduce
from benchmarks.reproduce import Arm, Source
from benchmarks.reproduce_sources import PER_CLASS, SOURCES, few_labels, few_tags
from student_train.recipe import find_recipe
from tests.end_to_end.support import dumped, ok
from tests.teacher_dump.test_gold import TAGS
from tests.texts import ENGLISH, RUSSIAN

WORDS = ("--student", "bilstm:8,8", "--vocab", "300", "--device", "cpu", "--steps", "2")


def in_this_process(module: str, *words: str | Path) -> float:
    ok(import_module(module).main, *words)
    return 0.0


def test_arms_are_trained_scored_and_judged(
    tmp_path: Path, tiny_teacher: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "command", in_this_process)
    lines = []
    for text in (ENGLISH + RUSSIAN) * 2:
        lines += [f"{word}\t{TAGS[0]}" for word in text.split()] + [""]
    corpus = tmp_path / "test.tsv"
    corpus.write_text("\n".join(lines) + "\n", "utf-8")

    def prepare(work: Path, size: str) -> tuple[list[Path], float]:
        model, store = tiny_teacher("bert", "tagging", TAGS), work / "a.zarr"
        options = {"head": "tagging", "logits": None, "hidden": "layer:4"}
        return [store if store.exists() else dumped(model, corpus, store, **options)], 0.5

    def score(student: Path, out: Path) -> float:
        words = ("--task", "pos", "--model", student, "--test", corpus, "--as-is")
        return reproduce.downstream(out, *words)

    arms = {
        "tags": Arm(("--recipe", "tinymbert-d0")),
        "both": Arm(("--recipe", "tinymbert-d2", "--vocab", "{work}/tags-0")),
    }
    source = Source(
        "a", "macro F1", {"small": "s"}, arms, [("both", "tags", "logits help")], prepare, score,
        lambda size: WORDS,
    )  # fmt: skip
    said = reproduce.reproduce(source, tmp_path / "work", 1, "small")
    assert "| teacher |  | 0.5 |  |" in said and "| both | --recipe tinymbert-d2" in said
    assert "- logits help: " in said and "of 1 seeds)" in said
    before = (tmp_path / "work/tags-0/model.safetensors").stat().st_mtime_ns
    assert reproduce.reproduce(source, tmp_path / "work", 1, "small") == said
    assert (tmp_path / "work/tags-0/model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", SOURCES)
def test_every_ordering_is_of_arms_that_there_are(name: str) -> None:
    source = SOURCES[name]
    for better, worse, _ in source.orderings:
        assert {better, worse} <= source.arms.keys()
    for arm in source.arms.values():
        find_recipe(arm.words[arm.words.index("--recipe") + 1])


def test_few_labels_and_few_tags(tmp_path: Path) -> None:
    rows = [f"text {n}\t{n % 2}" for n in range(1400)]
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    few, dev, all_ = (path.read_text().splitlines() for path in few_labels(table, tmp_path))
    assert len(few) == 1 + 2 * PER_CLASS and len(dev) == 501 and len(all_) == 901
    assert {row for row in all_ if not row.endswith("\t")} == set(few)
    assert not set(dev[1:]) & {row.rpartition("\t")[0] + "\t" for row in all_}
    words = tmp_path / "words.tsv"
    words.write_text("a\tO\nb\tB-X\n\nc\tO\n\nd\tO\n")
    out = few_tags(words, tmp_path / "few_words.tsv", 1, 2)
    assert out.read_text() == "a\tO\nb\tB-X\n\nc\t\n\n"
