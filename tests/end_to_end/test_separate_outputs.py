"""An output for log odds next to the output for the classes (Mukherjee & Awadallah 2019, section
4.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.train.distiller import Distiller
from tests.end_to_end.support import ok
from tests.student_train.support import distilling, first_batch

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


def test_the_card_tells_which_output_answers(classes: FeatureStore, tmp_path: Path) -> None:
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
