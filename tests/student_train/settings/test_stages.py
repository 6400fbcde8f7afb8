"""Stages: trained weights, their sequences, frozen weights; a resumed training gives the same."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForMaskedLM

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.blocks import chosen_blocks, split_blocks
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.model.freezing import OF_EMBEDDINGS, group_of
from teachonce.student_train.output.run import run
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.plan.train_plan import stages_of, terms_of
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from tests.making.stores import features_of, make_store
from tests.student_train import support
from tests.student_train.support import resume, same_weights, stop

KINDS = ("bert:16x2x2", "16x2x2", "bilstm:8,8")
options_for = partial(support.options_for, student="bert:16x2x2", steps=6, loss={"mlm": 1.0})


@pytest.mark.parametrize("student", KINDS)
def test_every_weight_has_a_place(store: FeatureStore, student: str) -> None:
    options = options_for(store, student=student, loss={"hidden": 1.0})
    model, _, _ = prepare(options, store)
    distiller = Distiller.of(model, options, store)
    groups = {name: group_of(name) for name, _ in distiller.named_parameters()}
    layers = {f"layers.{n}" for n in range(1, distiller.layers + 1)}
    assert layers | {"words", "head", "projection"} <= set(groups.values())
    parts = {g for n, g in groups.items() if "embedding" in n}
    assert parts <= {"embeddings", "words", "positions", "types"}
    assert ("types" in parts) == (student == "bert:16x2x2")
    assert list(groups.values()).count("words") == 1
    assert {g for n, g in groups.items() if n.startswith("projections")} == {"projection"}


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize(
    "freeze",
    [("embeddings", "layers.1"), ("layers", "projection"), ("head",), ("words",), ("types",)],
)
def test_what_is_frozen_does_not_move_and_the_rest_does(
    store: FeatureStore, student: str, freeze: tuple[str, ...]
) -> None:
    if freeze == ("types",) and student != "bert:16x2x2":
        pytest.skip("only a BERT has token types")
    loss = {"mlm": 1.0, "hidden": 1.0}
    options = options_for(store, student=student, loss=loss, freeze=freeze, lr=1e-2, steps=3)
    model, collator, _ = prepare(options, store)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(store, model, collator, options)
    moved = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    for name, _ in model.named_parameters():
        group = group_of(f"student.{name}")
        with_it = "embeddings" if group in OF_EMBEDDINGS else group.split(".")[0]
        assert (name in moved) != (group in freeze or with_it in freeze), name


def test_masks_of_a_dump_have_no_bound_of_the_student(store: FeatureStore) -> None:
    for view in (None, 1):
        with pytest.raises(UserError, match="--max-masks 20: a masked view of .* use --view 0"):
            checked_plan(options_for(store, max_masks=20, view=view), store)
    options = options_for(store, max_masks=2, view=0, mask_prob=0.5, steps=1)
    checked_plan(options, store)
    _, collator, _ = prepare(options, store)
    batch = next(iter(store.stream(0, 0, 512, view=0, features=())))
    read = collator(batch, 0, (0, 0, 0))
    assert len(read.labels) == 2 * len(batch)  # the texts have more than four tokens


def test_options_that_no_loss_reads(store: FeatureStore) -> None:
    given: dict[str, Any] = {"temperature": 4.0, "targets": "masked", "projection": "frozen"}
    for changes, unread in (
        ({"loss": {"mlm": 1.0}}, ["--temperature 4.0", "--targets masked", "--projection frozen"]),
        ({"loss": {"mlm": 1.0, "kl": 1.0}}, ["--projection frozen"]),
        (
            {"loss": {"kl": 1.0}, "freeze": ("projection",)},
            ["--projection frozen", "--freeze projection"],
        ),
        ({"loss": {"kl": 1.0}, "freeze": ("projection", "head")}, ["--projection frozen"]),
        ({"loss": {"kl": 1.0, "hidden": 1.0}}, []),
        ({"stages": ({"loss": {"kl": 1.0}}, {"loss": {"hidden": 1.0}})}, []),
    ):
        options = options_for(store, **{"loss": {"mlm": 1.0}, **given, **changes})
        assert checked_plan(options, store).unread() == unread
    assert checked_plan(options_for(store), store).unread() == []


@pytest.mark.parametrize(
    ("tier", "options", "unread"),
    [
        ("topk", {"loss": {"mlm": 1.0}}, "align pool projection_start outputs"),
        ("topk", {"loss": {"mlm": 1.0, "hidden": 1.0}}, "outputs"),
        ("topk", {"loss": {"attention": 1.0}}, "pool projection_start outputs"),
        ("embedding", {"loss": {"embedding": 1.0}}, "align pool projection_start outputs"),
        (
            "embedding",
            {"loss": {"embedding": 1.0}, "student": "static:33", "projection": "frozen"},
            "align pool projection projection_start outputs dropout",
        ),
        ("classification", {"loss": {"kl": 1.0, "logit": 1.0}}, "pool projection_start"),
        (
            "tagging",
            {"loss": {"kl": 1.0}, "student": "bilstm:8,8", "classifier_pooling": "last"},
            "pool projection_start outputs classifier_pooling",
        ),
        (
            "next-topk",
            {"loss": {"next": 1.0}, "student": "gpt2:16x1x2", "temperature": 1.0},
            "pool outputs",
        ),
        (
            "next-topk",
            {"loss": {"kl-next": 1.0}, "student": "gpt2:16x1x2", "targets": "unmasked"},
            "pool targets outputs",
        ),
    ],
)
def test_options_without_effect_are_reported(
    tmp_path: Path, tier: str, options: dict[str, Any], unread: str
) -> None:
    """If they were given; the model card leaves them out."""
    path = tmp_path / "store.zarr"
    make_store(path, features_of(tier=tier), 1)
    given: dict[str, Any] = {"student": "16x2x2", "pool": "sum", "outputs": "separate"}
    given |= {"dropout": 0.1, "steps": 1}
    if tier != "next-topk":  # a decoder's alignment is checked by itself
        given |= {"align": "match", "projection_start": "he"}
    with open_store(path) as opened:
        plan = checked_plan(TrainOptions(path, **{**given, **options}), opened)
        found = [line.split()[0].removeprefix("--").replace("-", "_") for line in plan.unread()]
        assert sorted(found) == sorted(unread.split())
        assert {*found} <= plan.without_effect()


def test_a_resolved_plan_has_the_sources_of_the_plan(store: FeatureStore) -> None:
    plan = checked_plan(options_for(store), store)
    assert plan.resolved().sources is plan.sources


def test_what_cannot_be_frozen(store: FeatureStore) -> None:
    everything: dict[str, Any] = {"freeze": ("embeddings", "layers", "head", "projection")}
    for changes, words in (
        ({"freeze": ("layers.3",)}, "--freeze layers.3: a student bert:16x2x2 has no such part"),
        ({"freeze": ("positions",), "student": "bilstm:8,8"}, "has no such part"),
        ({"freeze": ("types",), "student": "bilstm:8,8"}, "--freeze types: .*no such part"),
        (everything, "nothing is left to train"),
        ({"stages": ({"steps": 1}, everything)}, "stage 2: .*nothing is left to train"),
    ):
        with pytest.raises(UserError, match=words):
            checked_plan(options_for(store, **changes), store)
    stuck = options_for(store, loss={"hidden": 1.0}, freeze=("embeddings", "positions", "layers"),
                        projection="frozen", out=None)  # fmt: skip
    model, collator, _ = prepare(stuck, store)
    frozen = "--loss hidden: depends on no trained weight with --freeze embeddings,positions,layers"
    with pytest.raises(UserError, match=f"^{frozen}; choose another loss, or freeze less$"):
        train(store, model, collator, stuck)


def test_a_loss_without_a_gradient_is_named(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constant_loss.py").write_text(
        "from teachonce.losses import Loss\n"
        "def one(student, teacher):\n"
        "    return student.detach().sum() * 0.0\n"
        "ONE = Loss('one', one, teacher='normalised', student='runs', unit='', projection='always')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = options_for(store, loss={"constant_loss:ONE": 1.0}, out=None)
    model, collator, _ = prepare(options, store)
    with pytest.raises(UserError, match="^--loss constant_loss:ONE: depends on no .* value is 0$"):
        train(store, model, collator, options)


def test_gradual_unfreezing_goes_from_the_top(store: FeatureStore) -> None:
    last = {"unfreeze": "top-down", "freeze": ("positions",), "steps": 2}
    found = stages_of(options_for(store, stages=({"loss": {"mlm": 1.0}}, last)), 2)
    assert [stage.freeze for stage in found] == [
        (),
        ("positions", "embeddings", "layers.1", "layers.2"),
        ("positions", "embeddings", "layers.1"),
        ("positions", "embeddings"),
        ("positions",),
    ]
    assert [stage.steps for stage in found] == [6, 2, 2, 2, 2]
    given = options_for(store, stages=({"unfreeze": "top-down"},), freeze=("head",))
    assert all("head" in stage.freeze for stage in stages_of(given, 2))


def test_unfreezing_follows_any_list(store: FeatureStore) -> None:
    def frozen(order: list[str], student: str = "bert:16x2x2", **changes: Any) -> list[set[str]]:
        stages = ({"unfreeze": order, "steps": 2},)
        layers = 1 if student.startswith("bilstm") else 2
        options = options_for(store, stages=stages, student=student, **changes)
        checked_plan(options, store)
        return [set(stage.freeze) for stage in stages_of(options, layers)]

    below = {"embeddings", "layers.1", "layers.2"}
    assert frozen(["head", "projection", "layers", "embeddings"]) == [
        below | {"projection"}, below, {"embeddings"}, set(),
    ]  # fmt: skip
    # Parts outside the list are unchanged; words are embeddings, too.
    assert frozen(["words", "layers.2"]) == [
        {"positions", "types", "layers.1", "layers.2", "head", "projection"},
        {"positions", "types", "layers.1", "head", "projection"},
    ]
    assert frozen(["words"], "bilstm:8,8") == [{"layers.1", "head", "projection"}]
    own = frozen(["head"], "bilstm:8,8", freeze=("embeddings",))
    assert own == [{"embeddings", "layers.1", "projection"}]
    # A projection that the heads use has its own step from the top.
    options = options_for(
        store, stages=({"unfreeze": "top-down"},), student="bilstm:8,8", projection="student"
    )
    assert [stage.freeze for stage in stages_of(options, 1)] == [
        ("embeddings", "layers.1", "projection"), ("embeddings", "layers.1"), ("embeddings",), (),
    ]  # fmt: skip
    for order, printed in (
        (
            ["head", "layers.3"],
            "stage 1: unfreeze layers.3: a student bert:16x2x2 has no such part",
        ),
        (["nose"], "stage 1: unfreeze .*nose.*: expected 'top-down', or a list of different parts"),
        (["head", "head"], "different parts"),
        (list[str](), "a list of different parts"),
    ):
        with pytest.raises(UserError, match=printed):
            frozen(order)


def test_when_it_is_judged_counts_where_that_decides(store: FeatureStore) -> None:
    names = {options_for(store, eval_every=n).digest() for n in (2, 3)}
    assert len(names) == 1
    for changes in ({"best": True}, {"stages": ({"best": True},)}):
        assert len({options_for(store, eval_every=n, **changes).digest() for n in (2, 3)}) == 2


STAGES: tuple[dict[str, Any], ...] = (
    {"loss": {"hidden": 1.0}, "steps": 7, "freeze": ("head",)},
    {
        "loss": {"mlm": 1.0, "kl": 1.0}, "steps": 5, "best": True, "eval_every": 2, "lr": 2e-3,
        "schedule": "cosine", "lr_end": 1e-3, "warmup": 0.0,
    },
)  # fmt: skip


@pytest.mark.parametrize(
    "stop_at", [7, *(pytest.param(step, marks=pytest.mark.apart) for step in (3, 10))]
)
def test_a_stopped_training_goes_on_in_its_stage(
    store: FeatureStore, tmp_path: Path, stop_at: int
) -> None:
    options = options_for(store, stages=STAGES, checkpoint_every=1)
    whole, collator, _ = prepare(options, store)
    straight = train(store, whole, collator, options)
    out = tmp_path / "student"
    stop(store, options, out, stop_at)
    again, resumed, said = resume(store, options, out)
    assert said[0] == f"resume    after step {stop_at}"
    lines = (out / "metrics.jsonl").read_text().splitlines()
    rates = [row["lr"] for row in map(json.loads, lines) if "lr" in row]
    wave = [1.5e-3 + 5e-4 * math.cos(math.pi * step / 5) for step in range(5)]
    assert len(rates) == 12 and rates[7:] == pytest.approx(wave)
    assert resumed.validation == straight.validation and resumed.steps == straight.steps == 12
    same_weights(whole, again)


def test_the_best_weights_are_those_that_stay(store: FeatureStore, tmp_path: Path) -> None:
    """With a rate that diverges, the weights of an early validation are restored."""
    options = options_for(
        store, steps=30, eval_every=3, lr=0.3, warmup=0.0, best=True, out=tmp_path / "s", clip=50.0
    )
    report = run(options)
    rows = (tmp_path / "s" / "metrics.jsonl").read_text().splitlines()
    losses = [float(row.split('"valid_loss": ')[1].split(",")[0].rstrip("}")) for row in rows
              if "valid_loss" in row]  # fmt: skip
    assert report["result"]["valid_loss"] == min(losses) < losses[-1]
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "s")
    _, collator, _ = prepare(options, store)
    judged = support.validated(Distiller.of(saved, options, store), store, collator, options)
    assert judged["valid_loss"] == pytest.approx(min(losses), rel=1e-5)


def test_a_finished_staged_student_shows_its_stages(store: FeatureStore, tmp_path: Path) -> None:
    said: list[str] = []
    options = options_for(store, stages=STAGES, out=tmp_path / "student")
    report = run(options, say=said.append)
    assert report["result"]["steps"] == 12
    ends = [line for line in said if line.startswith("stage")]
    assert [line.split(":")[0] for line in ends] == [
        "stage     1 of 2 ends at step 7",
        "stage     2 of 2 ends at step 12",
    ]
    assert len(report["settings"]["stages"]) == 2


def test_short_sequences_are_not_learnt_from(store: FeatureStore) -> None:
    blocks, _ = split_blocks(store, 0.1)
    chosen = chosen_blocks(store, blocks, min_length=30)
    kept = {n for begin, end in chosen.tolist() for n in range(begin, end)}
    for begin, end in blocks.tolist():
        for number in range(begin, end):
            assert (number in kept) == (len(store[number].token_ids) >= 30)
    seen = [n for batch in store.stream(0, 0, 512, blocks=chosen) for n in batch.index.tolist()]
    assert sorted(seen) == sorted(kept) and 0 < len(kept) < len(store)
    with pytest.raises(UserError, match="no sequence of at least 5000 teacher tokens"):
        chosen_blocks(store, blocks, min_length=5000)


def test_rare_pieces_are_masked_more_often(store: FeatureStore) -> None:
    options = options_for(store, mask_words="rare")
    _, collator, _ = prepare(options, store)
    assert collator.table is not None
    tokens = collator.table.of(np.arange(len(store)))
    counts = np.bincount(tokens.ids, minlength=400)
    np.testing.assert_array_equal(collator.table.counts, counts[: tokens.ids.max() + 1])
    # Counted once: a training has a collator for each stage and validation.
    again = collator.serving(BatchPlan(options, terms_of(options, None)))
    assert again.table is not None and again.table.counts is collator.table.counts
    json_of_teacher = store.teacher_file("tokenizer.json").decode()
    plan = BatchPlan(options, terms_of(options, None))
    with pytest.raises(UserError, match="--mask-words rare: .* give Collator its store, or use"):
        Collator(collator.student_tokenizer, json_of_teacher, plan, max_length=64)
    times = np.zeros(400)
    for epoch in range(40):
        labels = collator.masker.dynamic(tokens, (0, epoch)).labels
        assert not (labels >= 0)[tokens.special].any()
        assert (labels >= 0).sum() == round(0.15 * (~tokens.special).sum())
        times += np.bincount(labels[labels >= 0], minlength=400)
    ordinary = np.setdiff1d(np.unique(tokens.ids), tokens.ids[tokens.special])
    share = times[ordinary] / (40 * counts[ordinary])
    rare, common = counts[ordinary] <= 3, counts[ordinary] >= np.quantile(counts[ordinary], 0.95)
    assert share[rare].mean() > 1.5 * share[common].mean() > 0


def test_masked_epochs_of_stages_differ(store: FeatureStore) -> None:
    first, second = stages_of(options_for(store, stages=({}, {})), 2)
    orders = [
        [n for b in open_store(store.path).stream(stage.seed, 0, 512) for n in b.index.tolist()]
        for stage in (first, second)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
