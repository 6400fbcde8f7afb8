"""An alignment for each loss: a batch is aligned once in each way, and each loss uses its own
alignment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from teachonce.align import Tokenizations
from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.data.stream import BatchOrder
from teachonce.student_train.plan.train_plan import terms_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.student_train.train.distiller import Distiller
from tests.end_to_end.support import Words, ok, refused, says
from tests.student_train.support import prepared

LOSS = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0, "cosine": 1.0}


def measured(store: FeatureStore, align: str) -> dict[str, torch.Tensor]:
    model, collator, options = prepared(store, loss=LOSS, align=align)
    torch.manual_seed(1)  # the same projections
    distiller = Distiller.of(model, options, store).eval()
    batches = BatchOrder(store, collator, store.blocks(), 0, 0, {"batch_tokens": 256}).endless()
    found: dict[str, torch.Tensor] = distiller(next(batches).to(torch.device("cpu")))
    return found


@pytest.fixture(scope="module")
def plain(store: FeatureStore) -> dict[str, dict[str, torch.Tensor]]:
    return {name: measured(store, name) for name in ALIGNMENTS}


@pytest.mark.parametrize(
    "words", ["kl=match,hidden=reduce", "reduce,kl=match", "match,cosine=reduce,kl=span"]
)
def test_each_loss_is_what_it_is_under_its_own_alignment_alone(
    words: str, store: FeatureStore, plain: dict[str, dict[str, torch.Tensor]]
) -> None:
    options = TrainOptions(store=store.path, loss=LOSS, align=words)
    aligned = {term.name: term.alignment or "span" for term in terms_of(options, None)}
    found = measured(store, words)
    assert list(found) == list(plain["span"])
    for name, value in found.items():
        torch.testing.assert_close(value, plain[aligned[name]][name])
    for name in ("kl", "hidden", "cosine"):  # no two are equal by chance
        assert len({float(values[name].detach()) for values in plain.values()}) == 3


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    aligned = Tokenizations.align

    def counting(sides: Tokenizations, strategy: str) -> Any:
        calls.append(strategy)
        return aligned(sides, strategy)

    monkeypatch.setattr(Tokenizations, "align", counting)
    yield calls


def test_a_batch_is_aligned_once_for_each_kind(store: FeatureStore, counted: list[str]) -> None:
    measured(store, "reduce,kl=match")
    assert sorted(counted) == ["match", "reduce"]
    counted.clear()
    measured(store, "span")
    assert counted == ["span"]


def test_masked_targets_ask_for_masks_where_logits_are_reduced(
    store: FeatureStore, tmp_path: Path
) -> None:
    words: Words = ("--store", store.path, "--vocab", "400", "--student", "16x2x2", "--view", "0")
    words += ("--batch-tokens", "512", "--device", "cpu", "--steps", "1")
    masked: Words = ("--loss", "mlm=1,kl=1,hidden=1", "--targets", "masked")
    printed = refused(main, *words, *masked, "--align", "kl=reduce", "--out", tmp_path / "a")
    says(printed, "--targets masked: under --align reduce")
    ok(main, *words, *masked, "--align", "kl=match,hidden=reduce", "--out", tmp_path / "b")
