"""Trainings of the benchmarks: trials, and losses that stored features and an online teacher share.

- The trials of whole trainings run the same functions with a tiny teacher and a few steps.
- One trainer has the same loss curve with stored features and with an online teacher.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import publish, table
from benchmarks.quality import distillation_helps as helps
from benchmarks.quality.judge import MEASURES
from benchmarks.speed.online_teacher import OnlineTeacher
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import parse_losses
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.making.models import Stores, Teachers


@pytest.fixture(scope="module")
def base(tiny_teacher: Teachers, corpus: Path) -> TrainOptions:
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


STEPS, KEPT = 8, 8
LOSSES = {"mlm": 1.0, "kl": 1.0, "logit": 0.1, "hidden": 3.0, "cosine": 1.0, "attention": 10.0}
EXACT = 1e-5
DEFAULT = {"attention": 5e-2, "valid_attention": 5e-2}  # a small loss, of maps in 8 bits
Curve = list[dict[str, float]]


@pytest.fixture(scope="module")
def stores(tiny_store: Stores) -> dict[str, Path]:
    words = {"views": 2, "hidden": "mean,groups:2", "logits": f"topk:{KEPT}", "batch_tokens": 1}
    return {codec: tiny_store("bert", 40, codec=codec, **words) for codec in ("exact", "default")}


def curve(
    store: FeatureStore, source: Any, align: str, view: int, **batches: Any
) -> tuple[Curve, dict[str, float]]:
    options = TrainOptions(
        store=store.path, vocab="500", student="32x2x4", align=align, loss=LOSSES, view=view,
        steps=STEPS, eval_every=STEPS, **batches, held_out=0.1, device="cpu",
    ).resolved()  # fmt: skip
    student, collator, _ = prepare(options, store)
    steps: Curve = []
    done = train(source, student, collator, options, on_step=lambda _, found: steps.append(found))
    assert len(steps) == STEPS
    return steps, done.validation


# Padding changes the last bit of the teacher's outputs, and each training step amplifies the
# difference. So use batches of one sequence, as in the dump of these stores, or larger batches
# without updates.
ONE_BY_ONE = {"batch_tokens": 1, "accumulate": 2}
STANDING_STILL = {"batch_tokens": 512, "lr": 1e-12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("align", "view", "batches", "bound"),
    [
        ("span", 1, ONE_BY_ONE, 1e-2),
        pytest.param("reduce", 0, ONE_BY_ONE, 1e-2, marks=pytest.mark.apart),
        ("span", 0, STANDING_STILL, 1e-3),
    ],
)
def test_same_losses(
    stores: dict[str, Path],
    tiny_teacher: Callable[[str], Path],
    align: str,
    view: int,
    batches: dict[str, Any],
    bound: float,
) -> None:
    """`bound` is the relative error allowed to codec default; `exact` has EXACT."""
    exact, default = (open_store(stores[codec]) for codec in ("exact", "default"))
    teacher = load_teacher(str(tiny_teacher("bert")), hidden="mean,groups:2", attention="mean")
    online, online_end = curve(exact, OnlineTeacher(exact, teacher), align, view, **batches)
    for store, bounds, others in ((exact, {}, EXACT), (default, DEFAULT, bound)):
        assert len(split_blocks(store, 0.1)[1]) > 0
        stored, stored_end = curve(store, store, align, view, **batches)
        for ours, theirs in zip([*stored, stored_end], [*online, online_end], strict=True):
            assert ours.keys() == theirs.keys() and len(ours) > len(LOSSES)
            for name, value in theirs.items():
                wanted = pytest.approx(value, rel=bounds.get(name, others), abs=others / 100)
                assert ours[name] == wanted, name
    if batches is ONE_BY_ONE:
        first, last = (sum(step["loss"] for step in part) for part in (online[:4], online[-4:]))
        assert last < first
