"""What the students of Mukherjee & Awadallah 2019 and 2020 need: stages, outputs, projections.

- Stages whose steps use equal numbers of labelled and other texts (Mukherjee & Awadallah 2019,
  5.1).
- An output for log odds next to the output for the classes (Mukherjee & Awadallah 2019, section
  4.1).
- The projection to the teacher's hidden size as a part of the student (Mukherjee & Awadallah 2020,
  eq. 5 and algorithm 1): its heads use it, losses compare it, and it is saved.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import labelled, split_blocks
from teachonce.student_train.losses.states import hidden_kld
from teachonce.student_train.model.any_student import own_projection
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import BatchPlan
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.store_training import StoreTraining
from teachonce.student_train.train.student_training import train
from tests.end_to_end.support import ok, refused, report_of, says
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.texts import ENGLISH
from tests.student_train import support
from tests.student_train.support import distilling, first_batch, resume, same_weights, stop
from tests.teacher_dump.windows.test_label_numbers import MOODS

LOSS = {"ce": 10.0, "log-odds": 0.5}


options_for = partial(support.options_for, batch_texts=6, data="balanced", loss=LOSS, held_out=0.1)


def training_of(store: FeatureStore, **changes: Any) -> StoreTraining:
    plan = plan_of(options_for(store, **changes), store)
    student, collator, _ = prepare(plan.options, store)
    training = StoreTraining(plan, student, [(plan.sources[0], collator)])
    training.enter(0)
    return training


def losses_of(
    training: StoreTraining, batch: StudentBatch, plan: BatchPlan
) -> tuple[Tensor, dict[str, Tensor]]:
    parts = training.distiller.compute(batch, plan.terms).losses
    return training.distiller.weighted(parts, plan.terms), parts


def weights(plan: BatchPlan) -> dict[str, float]:
    return {term.name: term.weight for term in plan.terms}


def test_each_step_has_a_batch_of_either_kind_with_its_losses(classes: FeatureStore) -> None:
    training = training_of(classes)
    assert [(plan.options.data, weights(plan)) for plan in training.stage.batches] == [
        ("labelled", {"ce": 10.0}), ("unlabelled", {"log-odds": 0.5}),
    ]  # fmt: skip
    stream, sizes = training.batches(0), list[int]()
    for _ in range(8):
        for plan, gold in zip(training.stage.batches, (True, False), strict=True):
            batch = next(stream)
            wanted = batch.distillation
            assert wanted and wanted.task
            sizes.append(len(batch.inputs.ids))
            assert ((wanted.task.gold >= 0) == gold).all()
            total, parts = losses_of(training, batch, plan)
            ((name, weight),) = weights(plan).items()
            assert list(parts) == [name]
            torch.testing.assert_close(total, weight * parts[name])
    stream.close()
    assert sizes.count(6) > 11 and max(sizes) == 6  # the last of a pool has fewer


def test_a_step_goes_along_the_sum_of_both(classes: FeatureStore) -> None:
    """Equation 8: the mean over labelled texts plus the mean over unlabelled texts."""
    training = training_of(classes, steps=1)
    stream = training.batches(0)
    each = [losses_of(training, next(stream), plan) for plan in training.stage.batches]
    stream.close()
    found: list[dict[str, float]] = []
    options = options_for(classes, steps=1)
    student, collator, _ = prepare(options, classes)
    train(classes, student, collator, options, on_step=lambda _, losses: found.append(losses))
    assert found[0]["loss"] == pytest.approx(sum(float(total.detach()) for total, _ in each))
    for _, parts in each:
        for name, value in parts.items():
            assert found[0][name] == pytest.approx(float(value.detach()))


def test_an_epoch_reads_all_of_what_there_is_more_of(classes: FeatureStore) -> None:
    training = training_of(classes, epochs=2.0)
    blocks, _ = split_blocks(classes, 0.1)
    rows = np.concatenate([np.arange(begin, end) for begin, end in blocks.tolist()])
    gold = int(labelled(classes)[rows].sum())
    assert gold > len(rows) - gold  # four of five have a label
    full, rest = divmod(gold, 6)
    assert 2 * full <= training.steps_of(0) <= 2 * (full + bool(rest) + len(rows) // 48)


def test_a_stopped_training_takes_the_same_batches(classes: FeatureStore, tmp_path: Path) -> None:
    options = options_for(classes, steps=3, checkpoint_every=1, accumulate=2)
    straight, collator, _ = prepare(options, classes)
    expected = train(classes, straight, collator, options).validation
    assert {"valid_ce", "valid_log-odds"} <= expected.keys()
    stop(classes, options, tmp_path, 1)
    again, resumed, _ = resume(classes, options, tmp_path)
    assert resumed.validation == expected
    same_weights(straight, again)


def test_from_the_command_line(
    classes: FeatureStore, tmp_path: Path, tiny_teacher: Teachers
) -> None:
    words = ("--vocab", 400, "--student", "bilstm:8,8", "--steps", 2, "--device", "cpu",
             "--data", "balanced", "--loss", "ce=10,log-odds=.5")  # fmt: skip
    out = tmp_path / "a"
    ok(main, "--store", classes.path, *words, "--batch-texts", 4, "--out", out)
    assert report_of(out)["result"]["steps"] == 2
    corpus = tmp_path / "all.tsv"
    rows = [f"all of these have a label, number {n}\t{MOODS[n % 2]}" for n in range(60)]
    corpus.write_text("\n".join(["sentence\tmood", *rows]) + "\n", "utf-8")
    columns = {"text_column": "sentence", "label_column": "mood"}
    model = tiny_teacher("bert", "classification", MOODS)
    path = dumped(model, corpus, tmp_path / "l.zarr", head="classification", logits=None, **columns)
    line = refused(main, "--store", path, *words, "--out", tmp_path / "b")
    says(line, "no sequence without a gold label", "--data")


BOTH = {"ce": 1.0, "log-odds": 1.0}


def distiller_of(store: FeatureStore, **changes: Any) -> tuple[Distiller, Any]:
    plain: dict[str, Any] = {"loss": BOTH, "outputs": "separate", "steps": 1}
    distiller, collator, _ = distilling(store, **plain | changes)
    return distiller, first_batch(store, collator, 10**5)


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:8,8"])
@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_each_loss_moves_its_own_output(
    request: pytest.FixtureRequest, kind: str, student: str
) -> None:
    distiller, batch = distiller_of(request.getfixturevalue(kind), student=student)
    own: Any = distiller.student.classifier
    apart: Any = distiller.scores
    assert apart.weight.shape == own.weight.shape
    for loss, moved, kept in (("ce", own, apart), ("log-odds", apart, own)):
        found = distiller(batch)[loss]
        (slope,) = torch.autograd.grad(found, moved.weight, retain_graph=True)
        assert slope.any()
        assert torch.autograd.grad(found, kept.weight, allow_unused=True) == (None,)
    with torch.no_grad():  # the same weights give the same function
        own.weight.copy_(apart.weight)
        own.bias.copy_(apart.bias)
    shared, _ = distiller_of(request.getfixturevalue(kind), student=student, outputs="shared")
    shared.student.load_state_dict(distiller.student.state_dict())
    assert shared.scores is None
    torch.testing.assert_close(shared(batch), distiller(batch))


def test_where_one_kind_alone_is_learnt_there_is_one_output(classes: FeatureStore) -> None:
    for loss in ({"log-odds": 1.0}, {"ce": 1.0, "kl": 1.0}, {"ce": 1.0, "sentence": 1.0}):
        assert distiller_of(classes, loss=loss)[0].scores is None
    stages = ({"loss": {"log-odds": 1.0}}, {"loss": {"ce": 1.0}})
    distiller, batch = distiller_of(classes, stages=stages)
    assert distiller.scores is not None
    outputs: dict[str, Any] = {"log-odds": distiller.scores, "ce": distiller.student.classifier}
    for name, answers in outputs.items():
        stage = [term for term in distiller.every if term.name == name]
        with torch.no_grad():
            before = distiller.compute(batch, stage).task_logits
            answers.bias.add_(1.0)  # the output by which a stage is validated
            after = distiller.compute(batch, stage).task_logits
        assert before is not None and after is not None
        torch.testing.assert_close(after, before + 1)


def test_the_card_shows_which_output_answers(classes: FeatureStore, tmp_path: Path) -> None:
    words = ("--store", classes.path, "--vocab", 400, "--student", "bilstm:8,8", "--steps", 2)
    both = "trained with `ce`; the extra output, trained with `log-odds`, is not part"
    for name, loss, printed in (
        ("a", "ce=1,log-odds=1", both),
        ("b", "log-odds=1", "classifier was trained with `log-odds`.\n"),
    ):
        out = tmp_path / name
        ok(main, *words, "--outputs", "separate", "--loss", loss, "--device", "cpu", "--out", out)
        assert printed in (out / "README.md").read_text()
        _, loaded = AutoModelForSequenceClassification.from_pretrained(
            out, output_loading_info=True
        )
        assert not any(loaded[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


OWN = ("--projection", "student", "--student", "bilstm:12,10")
SMALL = ("--vocab", 400, "--batch-texts", 8, "--device", "cpu")


prepared = partial(
    support.prepared, student="bilstm:12,10", projection="student", batch_texts=8, lr=1e-2,
    loss={"hidden-kld": 1.0, "ce": 1.0},
)  # fmt: skip


def test_the_head_and_the_loss_read_one_projection(tags: FeatureStore) -> None:
    student, collator, options = prepared(tags)
    own: Any = student.projection
    distiller = Distiller.of(student, options, tags).eval()
    same = own_projection(student) is own
    assert same and not distiller.projections
    assert own.out_features == tags.features.width
    batch = support.first_batch(tags, collator, 10**5)
    wanted = batch.distillation
    assert wanted and wanted.task and wanted.task.tokens is not None
    computed = distiller.compute(batch)
    states = distiller.encode(wanted.inputs or batch.inputs).last
    linear = states @ own.weight.T + own.bias
    pooled = own(wanted.runs.pool(states, options.resolved_pool))
    torch.testing.assert_close(
        computed.losses["hidden-kld"], hidden_kld(pooled, wanted.normalised["layer4"])
    )
    read = functional.gelu(linear)[wanted.task.tokens]
    torch.testing.assert_close(computed.task_logits, student.classifier(read))


def test_algorithm_1_moves_a_part_more_at_a_time(tags: FeatureStore) -> None:
    order = ["head", "projection", "layers", "embeddings"]
    moved = []
    for count in range(1, 5):
        stage = {"unfreeze": order[:count], "steps": 1, "loss": {"ce": 1.0}}
        student, collator, options = prepared(tags, stages=(stage,), weight_decay=0.0)
        before = {name: value.clone() for name, value in student.state_dict().items()}
        train(tags, student, collator, options)
        after = student.state_dict()
        moved.append({name.split(".")[-2] for name in after if (after[name] != before[name]).any()})
    recurrent = {"left_to_right", "right_to_left"}
    assert moved == [
        {"classifier"}, {"classifier", "projection"}, {"classifier", "projection", *recurrent},
        {"classifier", "projection", *recurrent, "embeddings"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_it_is_saved_and_loads_again(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    store, out = request.getfixturevalue(kind), tmp_path / "student"
    loss = "ce=1,sentence-gelu=1" if kind == "classes" else "ce=1,hidden-gelu=1"
    words = ("--store", store.path, *OWN, *SMALL, "--loss", loss, "--steps", 3, "--out", out)
    ok(main, *words, *(("--classifier-pooling", "last") if kind == "classes" else ()))
    factories: dict[str, Any] = {
        "classes": AutoModelForSequenceClassification,
        "tags": AutoModelForTokenClassification,
    }
    model, printed = factories[kind].from_pretrained(out, output_loading_info=True)
    assert not any(printed[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = json.loads((out / "config.json").read_text())
    assert config["projection_size"] == store.features.width == model.classifier.in_features
    assert config.get("classifier_pooling") == ("last" if kind == "classes" else None)
    assert "| projection | student |" in (out / "README.md").read_text()


def test_where_there_can_be_none_is_reported(
    tags: FeatureStore, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n".join(ENGLISH * 4), "utf-8")
    two = dumped(tiny_teacher("bert"), corpus, tmp_path / "two.zarr", hidden="mean,groups:2")
    cases: tuple[Any, ...] = (
        (tags.path, "--projection student --student 16x2x2", ("applies only to a BiLSTM",)),
        (tags.path, "--classifier-pooling last", ("applies only to a BiLSTM", "--student is tiny")),
        (tags.path, "--recurrent-dropout .1", ("dropout 0.1: applies only to a BiLSTM",)),
        (
            two,
            "--projection student --student bilstm:12,10",
            ("--projection student", "mean, groups2", "has one projection"),
        ),
    )
    for store, words, printed in cases:
        line = refused(main, "--store", store, *words.split(), *SMALL, "--out", tmp_path / "no")
        says(line, *printed)
