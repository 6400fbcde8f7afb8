"""Recipes of the package equal their sources: numbers and required features, and they can be
trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.stream import BatchOrder
from teachonce.student_train.losses.logits import kl
from teachonce.student_train.settings.recipe import all_recipes
from teachonce.student_train.settings.shapes import parse_student
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import Word, Words, ok, refused, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.student_train.support import distilling

# The thesis, section 4.2, pages 31 and 32; values that it omits are DistilBERT's.
THESIS = {
    "temperature": 2.0, "lr": 5e-4, "clip": 5.0, "epochs": 3.0, "batch_texts": 12, "accumulate": 50,
    "min_length": 11, "freeze": ("positions", "types"), "dropout": 0.1, "vocab": "teacher",
    "warmup": 0.05, "weight_decay": 0.0,
}  # fmt: skip
EXPERIMENTS = {  # Table 4.2: KL, cross-entropy, cosine, layers
    1: (0.625, 0.25, 0.125, "1,3,5,8,10,12"),
    2: (0.625, 0.25, 0.125, "1,2,4,6,9,11"),
    3: (0.6, 0.2, 0.2, "1,5,8,11"),
    4: (0.7, 0.2, 0.1, "1,2,3,4"),
    5: (0.7, 0.2, 0.1, "1,3,5,7"),
    6: (0.7, 0.2, 0.1, "1,2,3,4"),
}
SIZE = (
    "--optimizer", "adamw", "--batch-tokens", "256", "--accumulate", "1", "--steps", "2",
    "--device", "cpu",
)  # fmt: skip


def options_of(name: str) -> dict[str, Any]:
    return dict(all_recipes()[name].options)


def test_layers_and_weights_of_the_thesis() -> None:
    for number, (*weights, chosen) in EXPERIMENTS.items():
        count = chosen.count(",") + 1
        own = {
            "loss": dict(zip(("kl", "mlm", "cosine"), weights, strict=True)),
            "init": f"layers:{chosen}", "student": f"teacher:{count}",
        }  # fmt: skip
        combined = {"combine": "outputs"} if number == 6 else {}  # section 4.2, Experiment 6
        assert options_of(f"slovakbert-{number}") == THESIS | own | combined
        assert sum(weights) == pytest.approx(1)
        needs = all_recipes()[f"slovakbert-{number}"].needs
        assert needs["masked"] and needs["hidden"] == "layer:I"
        two = {"stores": 2, "model": True}  # the students of 1 and 2; layers of their teacher
        assert needs.items() >= two.items() if number == 6 else not needs.keys() & two.keys()


def test_stage_two_of_mixed_vocabularies() -> None:
    """Zhao et al. 2021, section 4; test_stage_one.py has stage I."""
    settings = {
        "optimizer": "lamb", "lr": 1.25e-3, "warmup": 0.1, "steps": 300_000, "batch_texts": 2048,
        "student": "bert:256x6x4",
    }  # fmt: skip
    mlm: dict[str, Any] = {"loss": {"mlm": 1.0}, "max_masks": 20}
    labels: dict[str, Any] = {
        "loss": {"kl": 1.0}, "targets": "masked", "vocab": "teacher", "init": "random",
        "temperature": 1.0,  # the paper omits it
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {
        "mixed": {**mlm, "init": "mixed-vocab"},
        "nokd": {**mlm, "init": "random", "vocab": "mixed-vocab"},
        "tied": {**mlm, "init": "mixed-vocab"},
        "vanilla-30k": labels,
        "pruned": {**labels, "prune_to": "5k"},  # section 6
        "base-5k": {**mlm, "student": "bert:768x12x12", "init": "random", "vocab": "mixed-vocab"},
    }
    for name, own in rows.items():
        assert options_of(f"zhao-{name}") == settings | own, name
        nearest = "KL of the stored pieces, words masked instead of tokens, and no cap of 20"
        assert (nearest in all_recipes()[f"zhao-{name}"].about) == ("kl" in own["loss"])
    assert {f"zhao-{name}" for name in rows} == {
        name for name in all_recipes() if name.startswith("zhao-")
    }
    needs = {name: all_recipes()[f"zhao-{name}"].needs for name in rows}
    assert (needs["mixed"]["tied"], needs["tied"]["tied"]) == (False, True)
    shape = parse_student("bert:256x6x4")  # 6 x 256 of 4 heads; 12 x 256 is 256x12x4
    assert (shape.width, shape.layers, shape.heads) == (256, 6, 4)


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers,
    tiny_store: Stores,
) -> dict[str, Path]:  # fmt: skip
    """Dump one text: plain, with masked views, and of mixed vocabularies."""
    found = {
        "plain": tiny_store("bert", attention="none"),
        "views": tiny_store("bert", hidden="layer:4", attention="none", views=2),
    }
    folder = tmp_path_factory.mktemp("published")
    corpus = found["plain"].with_name("corpus.txt")
    words = ("--width", 16, "--steps", 2, "--batch-tokens", 256, "--max-length", 32, "--weights")
    for name, tie in (("mixed", ()), ("tied", ("--tie",))):
        found[name] = folder / f"{name}.zarr"
        ok(
            teacher_dump, "mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus,
            "--vocab", 300, *words, *tie, "--device", "cpu", "--out", found[name],
        )  # fmt: skip
    return found


CUT = ("--student", "teacher:2", "--init", "layers:1,4")
TRAINED: dict[str, tuple[str, Words]] = {
    "slovakbert-3": ("views", CUT),
    "slovakbert-6": ("views", ()),
    "slovakbert-two-teachers": ("views", CUT),
    "zhao-mixed": ("mixed", ()),
    "zhao-nokd": ("mixed", ()),
    "zhao-tied": ("tied", ()),
    "zhao-vanilla-30k": ("views", ()),
    "zhao-pruned": ("views", ("--prune-to", "300")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_recipes_train(
    name: str, stores: dict[str, Path], tmp_path: Path, tiny_teacher: Teachers
) -> None:
    store, words = TRAINED[name]
    given: list[Word] = ["--store", stores[store]] * all_recipes()[name].needs.get("stores", 1)
    if name == "slovakbert-6":
        init = f"layers:1,2@{tiny_teacher('bert')}"
        line = refused(student_train, *given, "--recipe", name, *CUT, *SIZE, "--out", tmp_path)
        says(line, name, "layers of the original teacher, but the stores", "--init layers:1,4@DIR")
        words = ("--student", "teacher:2", "--init", init)
    options = options_of(name)
    if "vocab" not in (*options, *words) or options.get("vocab") == "5k":
        given += [] if store in ("mixed", "tied") else ["--vocab", 300]
    if "student" not in options or name.startswith("zhao-"):
        given += ["--student", "16x2x2"]
    said = ok(student_train, *given, "--recipe", name, *words, *SIZE, "--out", tmp_path / "a")
    assert "student in" in said and (tmp_path / "a/model.safetensors").exists()
    recipe = all_recipes()[name]
    card = (tmp_path / "a/README.md").read_text("utf-8")
    assert f"\n\nRecipe `{name}`: {recipe.about}. After {recipe.source}.\n\n" in card
    nearest = name in ("slovakbert-3", "slovakbert-6", "zhao-vanilla-30k", "zhao-pruned")
    assert nearest == ("nearest: " in recipe.about)


@pytest.mark.slow
def test_students_of_the_thesis_teach_its_sixth(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """Through all steps: stores of two students, and the layers of their teacher."""
    corpus, teacher = write_corpus(tmp_path / "a.txt", 20), tiny_teacher("roberta")
    kept: dict[str, Any] = {"attention": "none", "views": 2}
    first = dumped(teacher, corpus, tmp_path / "0.zarr", hidden="layer:4", **kept)
    stores: list[Word] = []
    for number, layers in ((1, "1,3,4"), (2, "1,2,4")):
        words: Words = ("--student", "teacher:3", "--init", f"layers:{layers}", *SIZE)
        student = tmp_path / f"student-{number}"
        recipe = f"slovakbert-{number}"
        ok(student_train, "--store", first, "--recipe", recipe, *words, "--out", student)
        store = tmp_path / f"{number}.zarr"
        stores += ["--store", dumped(student, corpus, store, hidden="layer:3", **kept)]
    words = ("--student", "teacher:2", "--init", f"layers:1,2@{teacher}", *SIZE)
    said = ok(student_train, *stores, "--recipe", "slovakbert-6", *words, "--out", tmp_path / "6")
    assert "layers 1, 2 of 4, cut to 32" in said and "masked-LM head" in said
    assert f"all of {teacher.name}, weights " in said


@pytest.mark.parametrize(
    ("name", "store", "words"),
    [
        ("slovakbert-6", "views", ["needs 2 teachers", "--store 2 times"]),
        ("zhao-mixed", "tied", ["were trained with --tie", "without it", "--recipe zhao-mixed"]),
        ("zhao-tied", "mixed", ["were trained without --tie", "with it", "--recipe zhao-tied"]),
        ("slovakbert-3", "plain", ["masked views", "store.zarr has none", "--views 2"]),
        ("kolesnikova-distil-small", "plain", ["hidden groups:2", "has mean", "--hidden groups:2"]),
        ("kolesnikova-tiny30-kl-mse-mf", "views", ["hidden mean", "has layer4"]),
        ("tinymbert-d2", "plain", ["hidden layer:I", "has mean"]),
    ],
)
def test_stores_without_what_a_recipe_needs_are_refused(
    name: str, store: str, words: list[str], stores: dict[str, Path], tmp_path: Path
) -> None:
    given = ("--store", stores[store], "--recipe", name, "--vocab", 300, "--student", "16x2x2")
    start = ("--init", "random") if name.startswith("slovakbert") else ()  # layers of 12
    says(refused(student_train, *given, *start, *SIZE, "--out", tmp_path / "a"), name, *words)


def test_an_option_beside_a_recipe_makes_up_for_what_it_needs(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    given: Words = ("--store", stores["plain"], "--recipe", "slovakbert-3", *CUT, *SIZE)
    ok(student_train, *given, "--view", 0, "--loss", "mlm=1", "--out", tmp_path / "a")
    given = ("--store", stores["mixed"], "--recipe", "zhao-mixed", "--student", "16x2x2", *SIZE)
    ok(student_train, *given, "--best", "--no-best", "--out", tmp_path / "b")


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_under_reduce_outputs_of_pieces_are_summed(stores: dict[str, Path], pool: str) -> None:
    store = open_store(stores["plain"])
    losses = {"kl": 1.0, "hidden-sum": 0.1}
    torch.manual_seed(0)
    distiller, collator, options = distilling(
        store, vocab="300", align="reduce", pool=pool, loss=losses
    )
    batch = next(BatchOrder(store, collator, store.blocks(), 0, 0, {"batch_tokens": 256}).endless())
    wanted = batch.distillation
    assert wanted is not None and wanted.inputs and wanted.logits and wanted.logit_runs
    read = distiller.encode(wanted.inputs)
    member, begin = wanted.logit_runs.member, [*wanted.logit_runs.begin.tolist(), None]
    runs = [member[i:j] for i, j in zip(begin[:-1], [*begin[1:-1], len(member)], strict=True)]
    assert max(map(len, runs)) > 1
    logits = distiller.logits(read.last)
    pooled = torch.stack([getattr(logits[run], pool)(dim=0) for run in runs])
    found = distiller(batch)
    want = kl(pooled, wanted.logits, options.temperature)
    torch.testing.assert_close(found["kl"], want)
    own = wanted.runs.pool(torch.stack(read.states[1:]).mean(0), pool)
    (projection,) = distiller.projections.values()
    gap = (projection(own) - wanted.normalised["mean"]).detach().numpy().astype(np.float64)
    assert found["hidden-sum"].item() == pytest.approx((gap**2).sum() / len(gap), rel=1e-4)
