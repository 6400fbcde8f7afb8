"""Stages whose steps use equal numbers of labelled and other texts (Mukherjee & Awadallah 2019,
5.1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import labelled, split_blocks
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import BatchPlan
from teachonce.student_train.train.store_training import StoreTraining
from teachonce.student_train.train.student_training import train
from tests.end_to_end.support import ok, refused, report_of, says
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.student_train import support
from tests.student_train.stopping import resume, same_weights, stop
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
