"""Recipes of the package equal their sources, and can be trained.

- Recipes of the package equal their sources: numbers and required features, and they can be
  trained.
- Recipes of Kolesnikova et al. 2022 equal the paper, row by row, and can be trained.
  T1, T3, T4 are tables of the paper, F4 a figure, B an appendix, 3.3 and 4.1 sections; "code" is
  github.com/ayeffkay/rubert-tiny, whose scripts contain the details that the paper omits.
- Recipes of Mukherjee & Awadallah 2019 and 2020 equal the papers: each number has its place in the
  paper next to it. test_published_formulas.py computes the losses from their equations.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from teachonce.store import open_store
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.cli import main
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.stream import BatchOrder
from teachonce.student_train.losses.logits import kl
from teachonce.student_train.plan.train_plan import stages_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.recipe import Recipe, all_recipes
from teachonce.student_train.settings.shapes import parse_student
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import Word, Words, ok, refused, report_of, says
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
    """Zhao et al. 2021, section 4; test_stages.py has stage I."""
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


def test_an_option_replaces_what_a_recipe_needs(stores: dict[str, Path], tmp_path: Path) -> None:
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
def paper_stores(tiny_store: Stores) -> dict[str, Path]:
    return {
        "tiny": tiny_store("bert", 30, hidden="mean:0", attention="none", logits="head"),
        "distil": tiny_store("bert", 30, hidden="groups:2", attention="groups:2", logits="head"),
    }


SMALL: Words = ("--batch-texts", 4, "--accumulate", 2, "--device", "cpu")


@pytest.mark.parametrize(
    "row", ["tiny30-mlm", "tiny30-kl-rm", "tiny30-kl-mse-rf", "tiny30-mse-rt", "distil-small"]
)
def test_recipes_of_kolesnikova_train(
    row: str, paper_stores: dict[str, Path], tmp_path: Path
) -> None:
    of = "distil" if row == "distil-small" else "tiny"
    size: Words = () if of == "distil" else ("--vocab", 300, "--student", "16x2x2")
    words: Words = ("--recipe", f"kolesnikova-{row}", *size, *SMALL, "--steps", 2)
    ok(main, "--store", paper_stores[of], *words, "--out", tmp_path / "a")
    report = report_of(tmp_path / "a")
    assert set(report["settings"]["loss"]) == set(ROWS[row]["loss"])
    assert all(f"valid_{name}" in report["result"] for name in ROWS[row]["loss"])


def test_the_arm_without_pre_training_is_saved_as_it_starts(
    paper_stores: dict[str, Path], tmp_path: Path
) -> None:
    words: Words = (
        "--recipe", "kolesnikova-tiny30-none", "--vocab", 300, "--student", "bert:16x2x2",
    )  # fmt: skip
    given: Words = ("--store", paper_stores["tiny"], *words, "--device", "cpu")
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
