"""Recipes of Mukherjee & Awadallah 2019 and 2020 equal the papers: each number has its place in the
paper next to it. test_published_formulas.py computes the losses from their equations."""

from __future__ import annotations

from typing import Any

import pytest

from teachonce.student_train.plan.train_plan import stages_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.recipe import Recipe, all_recipes

SHARED_2019 = {
    "student": "bilstm:300,600",  # section 6, Parameter Configurations: GloVe 300; 600 a direction
    "batch_texts": 64,  # there
    "optimizer": "adadelta",  # there: no initial learning rate
    "lr": 1.0, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.0,  # Adadelta's own step
    "dropout": 0.4, "recurrent_dropout": 0.2,  # there
    "held_out": 0.1,  # there: 90 % for training, 10 % for validation
    "best": True,  # there: the best model by the validation loss
    "init": "random",  # there: words that GloVe lacks begin in U(-.1, .1), see --word-vectors
    "outputs": "separate",  # section 4.1: W^r, b^r in addition to W^s of section 3.1
    # Early stopping (there); the numbers are this project's.
    "eval_every": "epoch", "patience": 5, "epochs": 100,
}  # fmt: skip
SHARED_2020 = {
    "student": "bilstm:300,600",  # Table 14: E 300; Table 16 and appendix A.2: H 600
    "init": "svd",  # section 4.1, Multi-lingual word embeddings
    "batch_texts": 512,  # Table 12: 88.4, the best
    "dropout": 0.2,  # Table 11: 88.49, the best
    "optimizer": "adamw", "weight_decay": 0.0,  # appendix A.2: Adam
    "lr": 1e-3, "lr_end": 1e-8, "schedule": "cosine", "warmup": 0.0,  # appendix A.2
    "best": True,  # section 5.3: the best configuration by the validation loss is restored
    "outputs": "separate",  # equations 1 and 3: W^s, and W^r, b^r
    "held_out": 0.1, "eval_every": "epoch", "epochs": 3, "recurrent_dropout": 0.0,  # this project's
}  # fmt: skip
OWN = {"loss", "data", "unfreeze", "vocab", "projection", "classifier_pooling"}  # of each recipe
ALPHA, BETA, GAMMA = 10.0, 10.0, 1.0  # 2019, section 6: of CE, RL and LL in equation 8
CE, RL, LL = {"ce": ALPHA}, {"sentence-gelu-half": BETA}, {"log-odds-half": GAMMA}
TOP = ["head", "projection", "layers", "embeddings"]  # 2020, Table 4, from row to row
# The weights are this project's.
KLD, LOGITS, TAGS = {"hidden-kld": 1.0}, {"log-odds-half": 1.0}, {"ce": 1.0}

Stage = tuple[dict[str, float], str, Any]  # losses, data, unfreeze


def printed(recipe: Recipe) -> list[Stage]:
    """Return the losses of each stage, its texts, and the order of unfreezing."""
    stages = recipe.stages or (recipe.options,)
    return [(dict(each["loss"]), each["data"], each.get("unfreeze")) for each in stages]


OF_2019: dict[str, list[Stage]] = {
    "simple-rnn": [({"ce": 1.0}, "labelled", None)],  # section 6 (i), equations 2 and 3
    "simple-no-distillation": [({"ce": 1.0}, "labelled", None)],  # section 6 (ii)
    # Section 6.3: gold-labelled and teacher-labelled texts, jointly.
    "simple-hard": [({"ce": 1.0, "hard": 1.0}, "balanced", None)],
    "simple-joint": [(CE | RL | LL, "balanced", None)],  # section 5.1, equation 8
    # Section 5.2 and Table 12, column 1: RL | LL + CE, gradual unfreezing in the second stage.
    "simple-stagewise": [(RL, "unlabelled", None), (CE | LL, "balanced", "top-down")],
    # Section 5.3 and Table 12, column 3: RL + LL | CE.
    "simple-once": [(RL | LL, "unlabelled", None), (CE, "labelled", "top-down")],
}
OF_2020: dict[str, list[Stage]] = {  # Table 3, row by row
    "tinymbert-d0": [(TAGS, "labelled", None)],
    "tinymbert-d0-s": [(TAGS, "labelled", None)],
    "tinymbert-d1": [(TAGS | LOGITS, "balanced", None)],
    "tinymbert-d2": [(TAGS | LOGITS | KLD, "balanced", None)],  # equation 7
    "tinymbert-d3-1": [(KLD, "unlabelled", None), (TAGS | LOGITS, "balanced", None)],
    "tinymbert-d3-2": [(KLD, "unlabelled", TOP[1:]), (TAGS | LOGITS, "balanced", TOP)],
    "tinymbert-d4-1": [
        (KLD, "unlabelled", None), (LOGITS, "unlabelled", None), (TAGS, "labelled", None),
    ],
    "tinymbert-d4-2": [  # algorithm 1
        (KLD, "unlabelled", TOP[1:]), (LOGITS, "unlabelled", TOP), (TAGS, "labelled", TOP),
    ],
    "tinymbert-text": [  # section 6.6: the same, for the state of a text
        ({"sentence-kld": 1.0}, "unlabelled", TOP[1:]), (LOGITS, "unlabelled", TOP),
        (TAGS, "labelled", TOP),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_2019)
def test_rows_of_2019(name: str) -> None:
    recipe = all_recipes()[name]
    assert printed(recipe) == OF_2019[name]
    options = dict(recipe.options)
    stages = [options | dict(stage) for stage in recipe.stages or [{}]]
    for stage in stages:
        few = set(stage["loss"]) == {"ce"}  # gold labels alone
        shared = {**SHARED_2019, "patience": 20 if few else 5}
        assert {key: stage[key] for key in stage.keys() - OWN} == shared
    rnn = name == "simple-rnn"  # section 6 (i) and (ii): words or WordPieces, last state or maximum
    assert options["vocab"] == ("words" if rnn else "teacher")
    assert options.get("classifier_pooling", "max") == ("last" if rnn else "max")
    assert "Table" in recipe.about


@pytest.mark.parametrize("name", OF_2020)
def test_rows_of_2020(name: str) -> None:
    recipe = all_recipes()[name]
    assert printed(recipe) == OF_2020[name]
    for stage in recipe.stages or [{}]:
        given = dict(recipe.options) | dict(stage)
        assert {key: given[key] for key in given.keys() - OWN} == SHARED_2020
    assert recipe.options["vocab"] == "teacher"  # section 4.1
    # Algorithm 1 and Table 4: stages 2 and 3 use the projection that stage 1 has trained.
    stands = recipe.options.get("projection") == "student"
    of_texts = name == "tinymbert-text"
    assert stands == (of_texts or name.startswith(("tinymbert-d3", "tinymbert-d4")))
    assert ("Tables 7 to 9" if of_texts else "Table 3") in recipe.about
    assert recipe.options.get("classifier_pooling", "max") == ("last" if of_texts else "max")
    assert "SVD's embeddings rescaled" in recipe.about  # open in section 4.1
    direction = "normalised per channel and KL(teacher, student) in equation 6"
    of_states = any("kld" in loss for losses, *_ in printed(recipe) for loss in losses)
    assert (direction in recipe.about) == of_states
    if name in ("tinymbert-d3-1", "tinymbert-d4-1"):  # section 5.2: end-to-end fine-tuning
        options = TrainOptions(store="a", stages=recipe.stages, **recipe.options)
        assert all(stage.freeze == () for stage in stages_of(options, 1))


def test_another_optimizer_brings_its_own_rate() -> None:
    options = {**all_recipes()["simple-joint"].options, "optimizer": "adamw", "lr": 3e-3}
    assert TrainOptions(store="a", **options).schedule_over(100).factor(99) == 1.0


def test_no_other_recipe_has_the_papers_names() -> None:
    names = {name for name in all_recipes() if name.startswith(("simple-", "tinymbert-"))}
    assert names == OF_2019.keys() | OF_2020.keys()


def test_table_4_step_by_step() -> None:
    """The last eight steps of D4.2 in Table 4: the trained weights and the rate of each step."""
    recipe = all_recipes()["tinymbert-d4-2"]
    options = TrainOptions(store="a", stages=recipe.stages, **recipe.options)
    parts = {"head", "projection", "layers.1", "embeddings"}
    steps = stages_of(options, 1)
    moving = [parts - set(step.freeze) for step in steps]
    down = [parts - {"embeddings", "layers.1", "projection"}, parts - {"embeddings", "layers.1"},
            parts - {"embeddings"}, parts]  # fmt: skip
    assert moving[3:] == [*down, *down]
    assert moving[:3] == [step - {"head"} for step in down[1:]]  # algorithm 1, stage 1
    for step in steps:
        rates = [step.resolved_lr * step.schedule_over(100).factor(at) for at in (0, 50, 100)]
        assert rates == pytest.approx([1e-3, (1e-3 + 1e-8) / 2, 1e-8])
