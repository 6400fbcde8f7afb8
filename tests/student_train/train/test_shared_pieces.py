"""KL over shared pieces, from a store's head tier and from stored logits, at the requested
tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from teachonce.align import Tokenizations, Tokens
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.cli import main
from teachonce.student_train.data import stream
from teachonce.student_train.data.stream import BatchOrder, prepared_batches
from teachonce.student_train.data.student_tokens import tokenize
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.models import Stores
from tests.student_train.support import distilling

LOSS = {"kl-shared": 1.0}
SMALL: Words = ("--vocab", "400", "--student", "16x2x2", "--batch-tokens", "512", "--device", "cpu")


@pytest.fixture(scope="module")
def head(tiny_store: Stores) -> FeatureStore:
    return open_store(tiny_store("bert", 30, logits="head", hidden="none", attention="none"))


distilled = partial(distilling, loss=LOSS, align="match")


@torch.no_grad()
@pytest.mark.parametrize("align", ["match", "reduce"])
def test_all_shared_pieces_of_the_head_are_compared(head: FeatureStore, align: str) -> None:
    distiller, collator, _ = distilled(head, align=align)
    raw = next(iter(head.stream(0, 0, 512, features=collator.features())))
    batch = collator(raw, 0, (0,)).to(torch.device("cpu"))
    wanted, match = batch.distillation, collator.vocabulary.match
    assert wanted is not None and wanted.shared is not None and wanted.logits is None
    read = distiller.encode(wanted.inputs or batch.inputs)
    logits = distiller.logits(read.last)
    weight, bias = head.head()
    shared = np.flatnonzero(match >= 0)
    assert len(np.unique(match[shared])) == len(shared) == wanted.shared.ids.shape[1]
    sides = Tokenizations(
        raw.texts, Tokens(raw.token_ids, raw.offsets, raw.special, raw.start),
        tokenize(collator.tokenizer, raw.texts), collator.vocabulary, collator.max_length,
    )  # fmt: skip
    _, alignment = sides.align(align)
    assert raw.logits is not None and wanted.logit_runs is not None
    rows = alignment.teacher[:, 0]  # each run has one token of the teacher
    teacher = torch.from_numpy(raw.logits.values[rows] @ weight[shared].T + bias[shared])
    member, begin = wanted.logit_runs.member, wanted.logit_runs.begin
    runs = list(torch.tensor_split(member, begin[1:]))
    assert max(map(len, runs)) == 1 if align == "match" else max(map(len, runs)) > 1
    pooled = torch.stack([logits[run].sum(0) for run in runs])[:, match[shared]]
    log_p, log_q = (teacher / 2).log_softmax(1), (pooled / 2).log_softmax(1)
    want = 4 * (log_p.exp() * (log_p - log_q)).sum(1).mean()
    torch.testing.assert_close(distiller(batch)["kl-shared"], want, rtol=1e-3, atol=1e-5)


def test_masked_and_other_tokens_are_all_tokens(store: FeatureStore) -> None:
    tokens, labelled = {}, set[int]()
    for targets in ("all", "masked", "unmasked"):
        _, collator, _ = distilled(store, targets=targets)
        raw = next(iter(store.stream(0, 0, 2048, features=collator.features())))
        batch = collator(raw, 0, (0,))
        assert batch.distillation is not None and batch.distillation.logit_runs is not None
        tokens[targets] = set(batch.distillation.logit_runs.member.tolist())
        labelled = set(batch.masked.tolist())
    assert tokens["masked"] and tokens["unmasked"]
    assert tokens["masked"] | tokens["unmasked"] == tokens["all"]
    assert tokens["masked"] <= labelled and not tokens["unmasked"] & labelled


def test_a_run_with_a_masked_token_is_not_unmasked(store: FeatureStore) -> None:
    """View 1 of a student that reads the teacher's tokens split: a masked word is masked whole."""
    runs = {}
    for targets in ("all", "unmasked"):
        _, collator, _ = distilled(store, targets=targets, align="reduce")
        raw = next(iter(store.stream(0, 0, 2048, view=1, features=collator.features())))
        taught = collator(raw, 1, (0,)).distillation
        assert taught is not None and taught.inputs is not None and taught.logit_runs is not None
        ids = taught.inputs.ids[taught.inputs.present]
        masked = set((ids == collator.student_tokenizer.mask_token_id).nonzero()[:, 0].tolist())
        runs[targets] = set(taught.logit_runs.member.tolist())
        assert masked & runs["all"] and not masked & runs.get("unmasked", set())
    assert runs["unmasked"] < runs["all"]


@pytest.mark.parametrize(("loss", "number"), [("kl-shared", 1), ("kl", 4)])
def test_a_logit_for_each_piece_is_prepared_for_few_batches(
    head: FeatureStore, loss: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, collator, _ = distilled(head, loss={loss: 1.0})
    seen = list[int]()
    monkeypatch.setattr(stream, "prefetched", lambda batches, ready: seen.append(ready))
    order = BatchOrder(head, collator, head.blocks(), 0, 0, {"batch_tokens": 512})
    prepared_batches(order, 0)
    assert seen == [number]


def test_the_card_tells_what_a_store_of_kept_logits_lacks(
    store: FeatureStore, head: FeatureStore, tmp_path: Path
) -> None:
    loss: Words = (*SMALL, "--steps", "2", "--loss", "mlm=1,kl-shared=1", "--align", "match")
    cards = {}
    for name, each in (("kept", store), ("head", head)):
        ok(main, "--store", each.path, *loss, "--out", tmp_path / name)
        cards[name] = (tmp_path / name / "README.md").read_text()
    assert each.features.logits is not None and store.features.logits is not None
    printed = f"among the {store.features.logits.size} best of a token"
    assert printed in cards["kept"] and "best of a token" not in cards["head"]
    line = refused(main, "--store", store.path, *loss[:-2], "--out", tmp_path / "c")
    says(line, "--align span: --loss kl-shared ", "--align kl-shared=match")
