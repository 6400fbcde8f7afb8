"""The projection to the teacher's hidden size as a part of the student (Mukherjee & Awadallah 2020,
eq. 5 and algorithm 1): its heads use it, losses compare it, and it is saved."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.losses.states import hidden_kld
from teachonce.student_train.model.any_student import own_projection
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import train
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.texts import ENGLISH
from tests.student_train import support

OWN = ("--projection", "student", "--student", "bilstm:12,10")
SMALL = ("--vocab", 400, "--batch-texts", 8, "--device", "cpu")


prepared = partial(
    support.prepared, student="bilstm:12,10", projection="student", batch_texts=8, lr=1e-2,
    loss={"hidden-kld": 1.0, "ce": 1.0},
)  # fmt: skip


def test_the_head_and_the_loss_stand_on_one_projection(tags: FeatureStore) -> None:
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
