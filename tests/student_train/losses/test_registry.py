"""Every loss is one entry, and its entry is correct."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import Parameter, signature

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from teachonce.student_train.losses.loss import FEATURES, Loss
from teachonce.student_train.losses.registry import (
    LOSSES,
    features_of,
    find,
    help_text,
    loss_names,
    losses_for,
    named,
)
from teachonce.support.errors import UserError


def test_every_entry_names_a_formula_that_takes_what_it_compares() -> None:
    for loss in LOSSES:
        sides = 3 if loss.student == "maps" else 2
        sides -= loss.student == "next" and loss.teacher == "nothing"
        taken = signature(loss.function).parameters.values()
        given = [each for each in taken if each.kind is not Parameter.KEYWORD_ONLY]
        assert len(given) == sides + loss.tempered, loss.name
        assert loss.feature is None or loss.feature in FEATURES
        compared = loss.student in ("runs", "sentence") or loss.name in ("embedding", "in-batch")
        assert (loss.projection == "none") == (not compared)


def test_a_name_means_one_loss_of_a_student() -> None:
    for output_kind in (None, "one label", "several labels", "numbers"):
        names = [loss.name for loss in losses_for(output_kind)]
        assert len(names) == len(set(names))
    assert [loss.formula for loss in losses_for("one label", ["kl"])] == ["task.kl"]
    assert [loss.formula for loss in losses_for(None, ["kl"])] == ["logits.kl"]
    assert not losses_for("one label", ["mlm"]) and not losses_for(None, ["ce", "log-odds"])


def test_a_whole_text_is_compared_through_a_gelu_as_tokens_are() -> None:
    (loss,), (has_token_features,) = (
        losses_for("one label", [name]) for name in ("sentence-gelu", "hidden-gelu")
    )
    assert loss.function is has_token_features.function and loss.projection == "always"
    assert (loss.teacher, loss.student, loss.feature) == ("sentence", "sentence", "hidden")


def test_what_losses_read_of_a_store() -> None:
    names = ["mlm", "kl", "hidden", "attention", "ce"]
    assert features_of(losses_for(None, names)) == ["hidden", "logits", "attention"]
    assert features_of(losses_for("one label", names)) == ["hidden", "task", "attention"]
    assert features_of(losses_for(None, ["mlm"])) == []
    assert features_of(losses_for(None, ["similarity", "embedding"])) == ["embedding"]


@pytest.mark.parametrize("loss", [each for each in LOSSES if each.student in ("vector", "scores")])
def test_losses_of_pairs_are_those_that_a_single_text_gives_nothing(loss: Loss) -> None:
    student, teacher = torch.tensor([[0.3, -2.0, 1.0]]), torch.tensor([[1.5, 0.2, -0.7]])
    assert (loss.function(student, teacher).item() == 0) == loss.of_pairs


def test_help_lists_every_loss() -> None:
    words = help_text().replace(",", " ").replace(";", " ").split()
    assert {word.partition("[")[0] for word in words} >= set(loss_names())
    assert {"jsd[:B]", "alm[:T]"} <= set(words)


def test_a_name_may_hold_a_number() -> None:
    (own,), (plain,) = find("jsd:0.3"), find("jsd")
    assert (own.name, own.value, plain.value) == ("jsd:0.3", 0.3, None)
    assert [loss.name for loss in named(["jsd:0.3", "next", "jsd"])] == ["next", "jsd", "jsd:0.3"]
    assert own.function.keywords == {"beta": 0.3}  # type: ignore[attr-defined]
    assert plain.function.keywords == {"beta": 0.5}  # type: ignore[attr-defined]
    for name, expected in (
        ("jsd:1", "--loss jsd:1: expected jsd:B with a number between 0 and 1, such as jsd:0.5"),
        ("jsd:x", "--loss jsd:x: expected jsd:B"),
        ("jsd:0_5", "--loss jsd:0_5: expected jsd:B"),
        ("alm:1_0", "--loss alm:1_0: expected alm:T"),
        ("alm:0", "--loss alm:0: expected alm:T with a number above 0, such as alm:100"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            find(name)
    assert named(["next:0.3"]) == []


def test_a_formula_of_your_own_is_0_without_rows() -> None:
    loss = replace(find("hidden")[0], formula=functional.smooth_l1_loss)  # its mean would be NaN
    student = torch.zeros(0, 3, requires_grad=True)
    value = loss.function(student, torch.zeros(0, 3))
    value.backward()
    assert value.item() == 0 and student.grad is not None


def test_a_formula_that_is_a_function_gets_the_parameter() -> None:
    def scaled(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
        return beta * (student - teacher)

    for name, beta in (("jsd", 0.5), ("jsd:0.3", 0.3)):
        (loss,) = (replace(each, formula=scaled) for each in find(name))
        assert loss.function(torch.tensor(3.0), torch.tensor(1.0)).item() == pytest.approx(2 * beta)
