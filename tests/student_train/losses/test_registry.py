"""Every loss is one entry, and has finite values and gradients.

- Every loss is one entry, and its entry is correct.
- Every loss has finite values and gradients if one side is almost empty.
"""

import re
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from teachonce.store import Logits
from teachonce.student_train.data.distributions import HEAD_BEST, TargetReader, fold
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets, kl, kl_shared
from teachonce.student_train.losses.loss import FEATURES, Loss
from teachonce.student_train.losses.next_token import NextTargets, Predictions, next_logprobs
from teachonce.student_train.losses.next_token import kl as kl_next
from teachonce.student_train.losses.registry import (
    LOSSES,
    features_read,
    find,
    help_text,
    loss_names,
    losses_for,
    named,
)
from teachonce.support.arrays import Array
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
    assert features_read(losses_for(None, names)) == ["hidden", "logits", "attention"]
    assert features_read(losses_for("one label", names)) == ["hidden", "task", "attention"]
    assert features_read(losses_for(None, ["mlm"])) == []
    assert features_read(losses_for(None, ["similarity", "embedding"])) == ["embedding"]


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


def test_a_formula_of_your_own_needs_a_gradient_of_predictions_as_well() -> None:
    def detached(student: Predictions, targets: Any, temperature: float) -> Tensor:
        return -student.following.detach().mean()

    loss = replace(find("kl-next")[0], formula=detached)
    student = torch.full((3, 2), -1.0, requires_grad=True)
    with pytest.raises(UserError, match="kl-next: its value has no gradient"):
        loss.function(Predictions(student, student[:, 0]), None, 1.0)


def test_a_formula_that_is_a_function_gets_the_parameter() -> None:
    def scaled(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
        return beta * (student - teacher)

    for name, beta in (("jsd", 0.5), ("jsd:0.3", 0.3)):
        (loss,) = (replace(each, formula=scaled) for each in find(name))
        assert loss.function(torch.tensor(3.0), torch.tensor(1.0)).item() == pytest.approx(2 * beta)


SCALES = [0.0, 1e-30, 1.0, 1e4]  # of states and logits


def targets_of(rng: np.random.Generator, runs: int, vocabulary: int, kept: int) -> LogitTargets:
    """Make targets over `vocabulary` shared pieces, with the `kept` best stored.

    Some rows have all their mass in one piece, and others almost no mass in any.
    """
    logits = rng.choice([1.0, 30.0, 500.0], (runs, 1)) * rng.normal(size=(runs, vocabulary + 1))
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    ids = np.argsort(-logprobs[:, :vocabulary], axis=1)[:, :kept]
    best = np.take_along_axis(logprobs, ids, axis=1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(0, 1 - np.exp(best).sum(axis=1)))
    return fold(ids, best, rest, np.zeros(runs, np.float32), np.arange(vocabulary))[0]


def sides(loss: Loss, rng: np.random.Generator, runs: int, width: int) -> tuple[Tensor, list[Any]]:
    """Make the student's side and the formula's other arguments: [runs,width], for maps
    [1,runs,runs]."""
    scale = float(rng.choice(SCALES))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(0, scale, shape)).float()

    if loss.student == "maps":
        pairs = torch.from_numpy(rng.random((1, runs, runs)) < 0.5)
        return normal(1, runs, runs), [normal(1, runs, runs), pairs]
    other: Any = normal(runs, width)
    if loss.student in ("masked", "next"):
        other = torch.from_numpy(rng.integers(0, width, runs))
    elif loss.teacher == "gold":  # an unknown label is -1
        other = torch.from_numpy(rng.integers(-1, width, runs))
    elif loss.student in ("pieces", "predictions"):
        kept = targets_of(rng, runs, width, int(rng.integers(1, width + 1)))
        runs = len(kept.ids)
        of_shared = SharedTargets(kept.ids, kept.logprobs, kept.valid)
        other = of_shared if loss.teacher == "shared" else kept
        if loss.of_next:
            following = torch.from_numpy(rng.integers(0, width, runs))
            other = NextTargets(**vars(kept), following=following)
    return normal(runs, width), [
        other,
        *([float(rng.choice([0.1, 1, 9]))] if loss.tempered else []),
    ]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.formula)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), runs=st.integers(0, 3), width=st.sampled_from([1, 2, 7]))
@example(seed=0, runs=0, width=7)
def test_every_loss_and_its_gradient_are_finite(
    loss: Loss, seed: int, runs: int, width: int
) -> None:
    student, others = sides(loss, np.random.default_rng(seed), runs, width)
    student.requires_grad_()
    own: object = student
    if isinstance(others[0], NextTargets):
        own = others[0].predictions(student)
    elif loss.student == "next":
        own, following = next_logprobs(student, others[0]), others[0]
        others = [following > 0] if loss.teacher == "edges" else []
    value = loss.function(own, *others)
    value.backward()
    assert value.isfinite() and student.grad is not None and student.grad.isfinite().all()
    assert len(student) or value.item() == 0


def test_the_piece_that_follows_counts_only_where_the_teacher_has_a_rest() -> None:
    logits, ids = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    half = torch.full((2,), 0.5).log()
    of_text = [torch.ones(2, 1, dtype=torch.bool), half, torch.zeros(2), torch.tensor([0, 3])]
    targets = NextTargets(ids, half[:, None], *of_text)
    topk = kl_next(targets.predictions(logits), targets, 1.0)
    # KL((1/2, 1/2) || (1/4, 3/4)), and in two rows with one of three other pieces.
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3) + 0.5 * np.log(3)
    assert float(topk) == pytest.approx(expected, rel=1e-5)
    of_text[1] = torch.full((2,), -torch.inf)  # as of random draws
    targets = NextTargets(ids, torch.zeros(2, 1), *of_text)
    drawn = kl_next(targets.predictions(logits), targets, 1.0)
    assert float(drawn) == pytest.approx(np.log(4), rel=1e-5)


def test_a_student_with_no_other_piece_learns_the_shares_of_the_kept_ones() -> None:
    """The teacher's 1/2 and 1/4, and 1/4 for missing pieces, give 2/3 and 1/3."""
    targets = LogitTargets(
        ids=torch.tensor([[0, 1]]),
        logprobs=torch.tensor([[0.5, 0.25]]).log(),
        valid=torch.tensor([[True, True]]),
        rest=torch.tensor([0.25]).log(),
        log_partition=torch.tensor([0.0]),
    )
    assert kl(torch.tensor([[2.0, 1.0]]).log(), targets, 1.0).item() == pytest.approx(0, abs=1e-6)
    # KL(2/3, 1/3 || 1/2, 1/2) = ln 2 - H(1/3)
    want = np.log(2) + 2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)
    assert kl(torch.zeros(1, 2), targets, 1.0).item() == pytest.approx(want, rel=1e-5)


def head_logits(rng: np.random.Generator, pieces: int) -> tuple[Logits, tuple[Array, Array]]:
    """Make three tokens of a store's head tier, and the head of a teacher with `pieces` pieces."""
    weight = rng.normal(0, 3, (pieces, 4)).astype(np.float32)
    bias = rng.normal(size=pieces).astype(np.float32)
    states = rng.normal(size=(3, 4)).astype(np.float32)
    logits = states @ weight.T + bias
    partition = np.logaddexp.reduce(logits, axis=1).astype(np.float32)
    return Logits(tier="head", log_partition=partition, values=states), (weight, bias)


@pytest.mark.parametrize("pieces", [1, 2, 200, HEAD_BEST, HEAD_BEST + 1, 300])
def test_a_head_and_a_student_with_the_teachers_vocabulary(pieces: int) -> None:
    """For sizes around `HEAD_BEST`: with all pieces stored, or all but some."""
    logits, head = head_logits(np.random.default_rng(pieces), pieces)
    targets, some = TargetReader(np.arange(pieces), head).of(logits, np.arange(3))
    assert some.all()
    own = torch.from_numpy(logits.values @ head[0].T + head[1]).requires_grad_()
    value = kl(own, targets, 2.0)  # the student is the teacher
    value.backward()
    # Above `HEAD_BEST` the rest is 1 minus a sum in float32, and the temperature takes its root.
    assert value.item() == pytest.approx(0, abs=1e-4 if pieces <= HEAD_BEST else 2e-2)
    assert own.grad is not None and own.grad.isfinite().all()


def test_a_head_of_which_the_student_shares_nothing() -> None:
    logits, head = head_logits(np.random.default_rng(0), 20)
    reader = TargetReader(np.full(20, -1), head)
    targets, some = reader.of(logits, np.arange(3))
    assert not some.any() and len(targets.ids) == 0
    shared, some = reader.shared_of(logits, np.arange(3))
    assert not some.any() and shared.ids.shape == (0, 0)
    assert kl_shared(torch.zeros(0, 7), shared, 2.0).item() == 0


def published(logits: Array, student: Array, pieces: Array, temperature: float) -> float:
    """Kolesnikova et al. 2022, eq. 8: both outputs cut to V_match, T^2 KL of their softmaxes."""
    shared = pieces >= 0
    p = softmax(logits[:, shared] / temperature)
    q = softmax(student[:, pieces[shared]] / temperature)
    return float((p * (np.log(p) - np.log(q))).sum(1).mean() * temperature**2)


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = raised / raised.sum(axis=1, keepdims=True)
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_head_gives_the_published_kl_over_all_shared_pieces(temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits, head = head_logits(rng, 2 * HEAD_BEST)
    pieces = np.where(rng.random(2 * HEAD_BEST) < 0.8, rng.permutation(2 * HEAD_BEST), -1)
    assert (pieces >= 0).sum() > HEAD_BEST
    targets, some = TargetReader(pieces, head).shared_of(logits, np.array([2, 0, 1]))
    assert some.all() and targets.ids.shape == (3, (pieces >= 0).sum())
    student = rng.normal(0, 3, (3, 2 * HEAD_BEST + 5))
    teacher = (logits.values @ head[0].T + head[1])[[2, 0, 1]].astype(np.float64)
    found = kl_shared(torch.from_numpy(student), targets, temperature).item()
    want = published(teacher, student, pieces, temperature)
    assert found == pytest.approx(want, rel=1e-4) and want > 0.1


def test_teacher_pieces_that_are_one_to_the_student_add_their_probabilities() -> None:
    logits, head = head_logits(np.random.default_rng(1), 6)
    pieces = np.array([2, 0, -1, 2, 2, 5])
    targets, _ = TargetReader(pieces, head).shared_of(logits, np.arange(3))
    mass = np.exp(logits.values @ head[0].T + head[1])
    assert targets.ids[0].tolist() == [0, 2, 5]
    want = np.log(np.stack([mass[:, 1], mass[:, [0, 3, 4]].sum(1), mass[:, 5]], axis=1))
    np.testing.assert_allclose(targets.logits, want, rtol=1e-4, atol=1e-4)


def test_kept_logits_give_the_shared_ones_among_them() -> None:
    logits, head = head_logits(np.random.default_rng(2), 40)
    every = logits.values @ head[0].T + head[1]
    ids = np.argsort(-every, axis=1)[:, :8]
    logprobs = np.take_along_axis(every, ids, 1) - logits.log_partition[:, None]
    rest = np.log(1 - np.exp(logprobs.astype(np.float64)).sum(1))
    partition = logits.log_partition
    kept = Logits("topk", partition, ids=ids.astype(np.int32), logprobs=logprobs, rest=rest)
    pieces = np.where(np.arange(40) % 2, np.arange(40), -1)
    targets, some = TargetReader(pieces).shared_of(kept, np.arange(3))
    student = np.random.default_rng(0).normal(size=(3, 40))
    want = []
    for row in np.flatnonzero(some):
        both = ids[row][pieces[ids[row]] >= 0]
        cut = np.full(40, -1)
        cut[both] = both
        want.append(published(every[[row]], student[[row]], cut, 2.0))
    found = kl_shared(torch.from_numpy(student[some]), targets, 2.0).item()
    assert some.any() and found == pytest.approx(np.mean(want), rel=1e-4)
