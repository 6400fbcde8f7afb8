"""`--align` by loss: parsing, the recorded settings, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from teachonce.student_train.plan.train_plan import terms_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError

LOSS = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0}


@pytest.mark.parametrize(
    ("words", "kl", "hidden"),
    [
        ("match", "match", "match"),
        ("kl=match,hidden=reduce", "match", "reduce"),
        ("reduce, kl=match", "match", "reduce"),
        ("kl=match", "match", "span"),
        ("hidden=reduce,match", "match", "reduce"),
    ],
)
def test_a_loss_without_its_own_takes_the_plain_word(words: str, kl: str, hidden: str) -> None:
    options = TrainOptions(store="a.zarr", loss=LOSS, align=words)
    aligned = {term.name: term.alignment for term in terms_of(options, None)}
    assert (aligned["kl"], aligned["hidden"]) == (kl, hidden)
    assert options.describing()["align"] == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "sideways",
            "--align sideways: expected one of span, match, reduce, bytes, or for a single loss",
        ),
        ("kl=sideways", "--align kl=sideways: expected one of span"),
        ("", "--align : expected one of span"),
        ("kl:match", "--align kl:match: expected one of span"),
        ("hiden=match", "--align hiden=match: no loss 'hiden'; expected one of mlm, next"),
        ("mlm=match", "mlm compares the student with its own text, not .* leave it out"),
        ("kl=match,kl=span", "--align kl=span: kl is given twice"),
        (
            "span,match",
            "--align span,match: span and match cannot both apply to all losses; give one",
        ),
    ],
)
def test_what_is_no_alignment_of_a_loss_is_reported(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainOptions(store="a.zarr", loss=LOSS, align=words)


@pytest.mark.parametrize(
    ("words", "pool", "message"),
    [
        ("span", None, "mean"),
        ("reduce", None, "sum"),
        ("reduce", "mean", "mean"),
        ("kl=match,hidden=reduce", None, "match=mean,reduce=sum"),
        ("kl=match,hidden=reduce", "sum", "sum"),
        ("kl=reduce,hidden=reduce", None, "sum"),  # mlm, the only loss left for span, has no runs
        ("kl=match,hidden=span", None, "mean"),
    ],
)
def test_the_pool_of_each_alignment_is_reported(words: str, pool: str | None, message: str) -> None:
    options = TrainOptions(store="a.zarr", loss=LOSS, align=words, pool=pool)
    assert options.describing()["pool"] == message


@pytest.mark.parametrize("words", ["span", "reduce"])
def test_a_decoder_may_have_an_alignment_that_one_stage_reads(words: str) -> None:
    losses = {"next": 1.0}, {"hidden": 1.0}
    stages = tuple({"loss": loss} for loss in losses)
    given: dict[str, Any] = {"store": "a.zarr", "student": "llama:8x1x1", "align": words}
    options = TrainOptions(**given, loss=losses[1], stages=stages)
    assert options.alignments == (words,)
    with pytest.raises(UserError, match=f"--align {words}: .* trims white space"):
        TrainOptions(**given, loss=losses[0], stages=stages[:1])
