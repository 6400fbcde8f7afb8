"""The choice of a sweep's best student, and sweeps without a comparable score."""

from __future__ import annotations

import math
from typing import Any

import pytest

from teachonce.student_train.output.ranking import (
    OF_LOSS,
    answers_alike,
    compares_losses,
    describe_best,
    flat,
    measure_of,
    measures_of,
    ranked,
)
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.options import options_of

NATS = "valid_mlm_per_character"


def row(folder: str, **figures: Any) -> dict[str, Any]:
    return {"folder": folder, **figures}


def test_nats_a_character_rank_students_of_any_losses() -> None:
    rows = [
        row("a", loss="hidden=1", valid_loss=0.2),
        row("b", loss="mlm=1", valid_loss=6.1, **{NATS: 1.5}),
        row("c", loss="mlm=1,hidden=30", valid_loss=23.7, **{NATS: 1.2}),
        row("d", loss="mlm=2", **{NATS: math.nan}),
    ]
    found = ranked(rows)
    assert [each["folder"] for each in found] == ["c", "b", "a", "d"]
    printed = describe_best(found)
    assert printed.startswith(f"best      c: {NATS} 1.2 ") and "2 without it come last" in printed


@pytest.mark.parametrize(
    ("worse", "better", "printed"),
    [
        ({"valid_accuracy": 0.5, "valid_agreement": 0.9}, {"valid_accuracy": 0.7},
         "b: valid_accuracy 0.7"),
        ({"valid_agreement": 0.5}, {"valid_agreement": 0.7}, "b: valid_agreement 0.7"),
        ({"valid_spearman": 0.7, "valid_loss": 0.1}, {"valid_spearman": 0.9},
         "b: valid_spearman 0.9 (rank correlation with"),
        ({"scores": {"text": {"bits/byte": 2.0}}}, {"scores": {"text": {"bits/byte": 1.0}}},
         "b: text bits/byte 1"),
        ({"scores": {"x": {"brier_score ↓": 0.7}}}, {"scores": {"x": {"brier_score ↓": 0.2}}},
         "b: x brier_score ↓ 0.2"),
        ({"valid_accuracy": 0.5, "valid_agreement": 0.2},  # equal: the next measure decides
         {"valid_accuracy": 0.5, "valid_agreement": 0.9}, "b: valid_accuracy 0.5"),
    ],
)  # fmt: skip
def test_the_first_measure_that_both_have_decides(
    worse: dict[str, Any], better: dict[str, Any], printed: str
) -> None:
    found = ranked([row("a", **worse), row("b", **better)])
    assert [each["folder"] for each in found] == ["b", "a"] and printed in describe_best(found)


def test_the_loss_ranks_students_that_learnt_by_the_same_one() -> None:
    same = [row("a", seed="0", valid_loss=2.0), row("b", seed="1", valid_loss=1.0)]
    assert [each["folder"] for each in ranked(same)] == ["b", "a"]
    assert "which is the same for all of them" in describe_best(ranked(same))
    other = [{**each, "loss": f"hidden={n + 1}"} for n, each in enumerate(same)]
    assert measure_of(other) is None and ranked(other) == other
    assert "best      unknown" in describe_best(other)
    assert compares_losses(["seed", "lr"]) and not compares_losses(["seed", "vocab"])


def test_the_score_of_a_task_comes_before_figures_of_the_validation() -> None:
    def scored(folder: str, accuracy: float, nats: float, **more: float) -> dict[str, Any]:
        scores = {"speed": {"cpu sentence_ms": 1.0}, "mood": {"accuracy": accuracy, **more}}
        return row(folder, scores=scores, **{NATS: nats})

    rows = [scored("a", 80.0, 1.2), scored("b", 90.0, 1.5, **{"accuracy deviation": 99.0})]
    assert [each["folder"] for each in ranked(rows)] == ["b", "a"]
    printed = describe_best(ranked(rows))
    assert printed.startswith("best      b: mood accuracy 90 (a score of a task")
    names = [measure.name for measure in measures_of([flat(each) for each in rows], ["lr"])]
    assert names == ["mood accuracy", NATS]


def test_students_with_one_answer_are_not_the_best() -> None:
    """All labels of `a` and `c` are equal; the held-out texts of `d` have one label, which it
    gives to all."""

    def labelled(folder: str, share: float, matthews: float) -> dict[str, Any]:
        return row(folder, valid_agreement=share, valid_agreement_matthews=matthews)

    rows = [labelled("a", 0.9, 0.0), labelled("b", 0.4, 0.1), labelled("c", 0.8, 0.0)]
    found = ranked(rows)
    assert [each["folder"] for each in found] == ["b", "a", "c"]
    assert describe_best(found).startswith("best      b: valid_agreement 0.4")
    assert describe_best(found[1:]).startswith("best      none: the figures are those of students")
    alone = [labelled("d", 1.0, 0.0), labelled("e", 0.9, 0.0)]
    assert describe_best(ranked(alone)).startswith("best      d: ")
    for accuracy, alike in ((100.0, False), (60.0, True)):
        scores = {"mood": {"accuracy": accuracy, "Matthews": 0.0}}
        assert answers_alike(flat(row("f", scores=scores, valid_agreement_matthews=0.5))) == alike
    both = {"mood": {"accuracy": 60.0, "Matthews": 0.0}, "names": {"entity F1": 40.0}}
    assert not answers_alike(flat(row("f", scores=both)))


def test_settings_of_the_loss_are_options() -> None:
    assert OF_LOSS - {"recipe"} <= options_of(TrainOptions).keys() | {"others"}
