"""Recipes of Kolesnikova et al. 2022 equal the paper, row by row, and can be trained.

T1, T3, T4 are tables of the paper, F4 a figure, B an appendix, 3.3 and 4.1 sections; "code" is
github.com/ayeffkay/rubert-tiny, whose scripts contain the details that the paper omits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from teachonce.student_train.arguments import checked_from
from teachonce.student_train.cli import main
from teachonce.student_train.settings.recipe import all_recipes
from teachonce.student_train.settings.shapes import parse_student
from tests.end_to_end.support import Words, ok, report_of, says
from tests.making.models import Stores

TRAINING = {
    "epochs": 64.0,  # B
    "batch_texts": 4,  # B: batch_size
    "accumulate": 128 * 8,  # B: gradient_accumulation_steps, of 8 GPUs
    "optimizer": "adamw",  # B
    "lr": 5e-4,  # B
    "projection_start": "he",  # B.2, 3: frozen and trained
    "schedule": "plateau",  # B: halved after three validations without progress
    "eval_every": "epoch",  # B
    "warmup": 0.05,  # B from 0; code: the share
    "clip": 5.0,  # code
    "weight_decay": 0.0,  # code
    "temperature": 2.0,  # code
    "targets": "unmasked",  # equation 2
    "view": 0,  # code: the teacher reads plain text
    "mask_words": "rare",  # code
    "init": "teacher",  # B.1
}
TINY = TRAINING | {"student": "bert:tiny"}
MLM, KL, MSE = {"mlm": 0.5}, {"kl-shared": 2.0}, {"hidden-raw-sum": 0.1}  # code: alpha_*
BOTH = "kl-shared=match,hidden-raw-sum=reduce"  # F4: KL-match is joined with MSE-reduce
LAYERS = {"attention": 1.0, "cosine": 1.0}  # 4.1; the weights are this project's
NONE = {name: value for name, value in TINY.items() if name != "epochs"}

ROWS: dict[str, dict[str, Any]] = {
    # T1: "-", "-"
    "tiny30-none": NONE | {"init": "random", "steps": 0, "loss": {"mlm": 1.0}, "vocab": "30k"},
    "tiny30-mlm": TINY | {"loss": MLM, "vocab": "30k"},  # T1: "-", MLM
    # T1: M and RM, MLM and KL; 3.3
    "tiny30-kl-m": TINY | {"loss": MLM | KL, "align": "match", "vocab": "30k"},
    "tiny30-kl-rm": TINY | {"loss": MLM | KL, "align": "reduce", "vocab": "30k"},
    # T1: MF, MT, RF, RT, with KL and without it; F4
    **{
        f"tiny30-{name}-{align[0]}{projection[0]}": TINY
        | {"loss": loss, "align": chosen, "projection": projection, "vocab": "30k"}
        for projection in ("frozen", "trainable")
        for name, loss, align, chosen in (
            ("kl-mse", MLM | KL | MSE, "match", "match"),
            ("kl-mse", MLM | KL | MSE, "reduce", BOTH),
            ("mse", MLM | MSE, "match", "match"),
            ("mse", MLM | MSE, "reduce", "reduce"),
        )
    },
    # T4
    **{
        f"tiny{size}-kl-m": TINY | {"loss": MLM | KL, "align": "match", "vocab": f"{size}k"}
        for size in (20, 10, 5)
    },
    # T1: distil-base, distil-small; 4.1 and T3
    "distil-base": TRAINING
    | {"loss": MLM | KL | LAYERS, "align": "match", "vocab": "teacher", "student": "teacher:6"},
    "distil-small": TRAINING
    | {"loss": MLM | KL | LAYERS, "align": "match", "vocab": "teacher", "student": "teacher:2"},
}


def test_there_is_a_recipe_for_each_row() -> None:
    found = {name for name in all_recipes() if name.startswith("kolesnikova-")}
    assert found == {f"kolesnikova-{row}" for row in ROWS}
    assert len(ROWS) == 14 + 3  # T1 has 14 students of the authors, T4 three more


@pytest.mark.parametrize("row", ROWS)
def test_a_recipe_has_the_numbers_of_its_row(row: str) -> None:
    recipe = all_recipes()[f"kolesnikova-{row}"]
    assert dict(recipe.options) == ROWS[row] and not recipe.stages
    groups = {"distil-base": "groups:6", "distil-small": "groups:2"}.get(row)  # 4.1
    wanted = {"hidden": groups, "attention": groups} if groups else {"hidden": "mean"}  # B.2
    assert recipe.needs == wanted
    if row.startswith("tiny"):
        shape = parse_student(recipe.options["student"])
        assert (shape.layers, shape.width, shape.heads) == (3, 264, 12)  # T3
    table = "T4" if row in ("tiny20-kl-m", "tiny10-kl-m", "tiny5-kl-m") else "T1"
    assert recipe.about.startswith(f"{table}, ")
    assert ("kl-shared" in recipe.options["loss"]) == ("kl" in recipe.about.lower())
    assert ("weighted by us" in recipe.about) == (groups is not None)


@pytest.fixture(scope="module")
def stores(tiny_store: Stores) -> dict[str, Path]:
    return {
        "tiny": tiny_store("bert", 30, hidden="mean:0", attention="none", logits="head"),
        "distil": tiny_store("bert", 30, hidden="groups:2", attention="groups:2", logits="head"),
    }


SMALL: Words = ("--batch-texts", 4, "--accumulate", 2, "--device", "cpu")


@pytest.mark.parametrize(
    "row", ["tiny30-mlm", "tiny30-kl-rm", "tiny30-kl-mse-rf", "tiny30-mse-rt", "distil-small"]
)
def test_recipes_train(row: str, stores: dict[str, Path], tmp_path: Path) -> None:
    of = "distil" if row == "distil-small" else "tiny"
    size: Words = () if of == "distil" else ("--vocab", 300, "--student", "16x2x2")
    words: Words = ("--recipe", f"kolesnikova-{row}", *size, *SMALL, "--steps", 2)
    ok(main, "--store", stores[of], *words, "--out", tmp_path / "a")
    report = report_of(tmp_path / "a")
    assert set(report["settings"]["loss"]) == set(ROWS[row]["loss"])
    assert all(f"valid_{name}" in report["result"] for name in ROWS[row]["loss"])


def test_the_arm_without_pre_training_is_saved_as_it_starts(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    words: Words = (
        "--recipe", "kolesnikova-tiny30-none", "--vocab", 300, "--student", "bert:16x2x2",
    )  # fmt: skip
    given: Words = ("--store", stores["tiny"], *words, "--device", "cpu")
    assert "0 steps of" in ok(main, *given, "--out", tmp_path / "a")
    result = report_of(tmp_path / "a")["result"]
    assert result["steps"] == result["tokens"] == 0
    printed = (tmp_path / "a/README.md").read_text()
    assert "with its initial weights: it was not trained." in printed
    one = AutoModelForMaskedLM.from_pretrained(tmp_path / "a").state_dict()
    ok(main, *given, "--seed", 1, "--out", tmp_path / "b")
    other = AutoModelForMaskedLM.from_pretrained(tmp_path / "b").state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    assert one[name].std() > 0.01 and not torch.equal(one[name], other[name])
    says(ok(main, *given, "--resume", "--out", tmp_path / "a"), "trained to its end", "0 steps")
    two = checked_from({"store": ("a.zarr",), "recipe": words[1], "epochs": 2.0})
    assert two.resolved().steps is None
