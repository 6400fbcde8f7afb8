"""The trials of whole trainings run the same functions with a tiny teacher and a few steps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.results import publish, table
from benchmarks.quality import distillation_helps as helps
from benchmarks.quality.judge import MEASURES
from teachonce.store import open_store
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import parse_losses
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions


@pytest.fixture(scope="module")
def base(tiny_teacher: Callable[..., Path], corpus: Path) -> TrainOptions:
    store = corpus.with_name("store.zarr")
    teacher = str(tiny_teacher("bert"))
    dump(DumpOptions(model=teacher, corpus=(str(corpus),), out=store, views=2, limit=4000))
    vocabulary = corpus.with_name("vocabulary")
    student_tokenizer("200", open_store(store)).save_pretrained(vocabulary)
    return TrainOptions(
        store=str(store), vocab=str(vocabulary), student="16x1x2", steps=3, batch_tokens=256,
        held_out=0.2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tags")
    words = "\n\n".join(f"The\tDET\n{w}\tNOUN\nis\tVERB" for w in ("book", "house", "line", "dog"))
    files = folder / "train.tsv", folder / "dev.tsv"
    for file in files:
        file.write_text(words + "\n", encoding="utf-8")
    return files


@pytest.mark.slow
def test_an_arm_is_tuned_judged_and_not_trained_twice(
    base: TrainOptions, tags: tuple[Path, Path], tmp_path: Path
) -> None:
    store = open_store(base.store)
    rate = helps.best_rate("match hidden", base, store, tmp_path)
    tried = {folder.name.rsplit("-", 1)[0] for folder in tmp_path.iterdir()}
    assert all(name.startswith("span-hidden-lr") for name in tried)  # tuned as span
    assert f"span-hidden-lr{rate:g}" in tried and len(tried) >= 3
    options = replace(base, lr=rate)
    folder = helps.one_student("match hidden", options, store, tmp_path)
    assert "tuned" not in helps.scores_of(folder)
    found = helps.with_tags(folder, tags)
    assert set(MEASURES) <= set(found) and 0 <= found["agreement"] <= 1
    (folder / helps.SCORES).write_text(json.dumps({**found, "mlm": -1.0}))
    again = helps.with_tags(helps.one_student("match hidden", options, store, tmp_path), tags)
    assert again["mlm"] == -1.0
    with pytest.raises(UserError, match="other settings"):
        helps.one_student("match hidden", replace(options, steps=4), store, tmp_path)


@pytest.mark.parametrize("arm", helps.ARMS)
def test_every_arm_names_options_that_fit(base: TrainOptions, arm: str) -> None:
    changes = dict(helps.ARMS[arm])
    loss = parse_losses((changes.pop("loss"),))
    replace(base, loss=loss, **changes).resolved()
    assert helps.TUNED_AS.get(arm, arm) in helps.ARMS


def test_a_section_replaces_the_one_of_the_same_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "RESULTS.md"
    publish("Speed", "now", table(["a"], [[1.23456]]), results)
    publish("Size", "now", table(["a"], [["x"]]), results)
    publish("Speed", "later", table(["a"], [[2]]), results)
    text = results.read_text()
    assert text.count("## Speed\n") == 1 and "later" in text and "1.235" not in text
    assert text.index("## Speed") < text.index("## Size")
    assert "cores" in text and "Speed" in capsys.readouterr().out
    results.write_text(text.replace("## Size", "### Size"))
    publish("Speed", "last", table(["a"], [[3]]), results)
    publish("Size", "last", table(["a"], [["y"]]), results)
    assert [line for line in results.read_text().splitlines() if line.startswith("#")] == [
        "# Results", "## Speed", "### Size",
    ]  # fmt: skip
    assert "| y |" in results.read_text() and "| x |" not in results.read_text()
