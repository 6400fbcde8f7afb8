"""Distillation over the teacher's whole vocabulary does not compute a logit for every token and
piece."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.data.stream import BatchOrder, prepared_batches
from teachonce.student_train.train import next_tokens
from teachonce.student_train.train.distiller import Distiller
from tests.making.decoders import random_llama
from tests.making.models import Stores, Teachers

LOSSES = {
    "next": 0.5,
    "next-inside": 0.5,
    "kl-next": 0.5,
    "reverse-kl": 0.2,
    "jsd:0.3": 0.2,
    "alm": 0.1,
}


@pytest.fixture(scope="module")
def stores(tiny_store: Stores) -> Stores:
    """Return a function of the tier of the logits."""
    words = {"attention": "none", "hidden": "none", "codec": "exact"}
    return lambda tier: tiny_store("gpt2", 30, logits=tier, **words)


@pytest.fixture(scope="module")
def store(stores: Stores) -> Path:
    return stores("head")


def distiller_of(batches: StudentBatches) -> Distiller:
    torch.manual_seed(0)
    return batches.distiller(random_llama(len(batches.tokenizer), layers=1))


def gradients(distiller: Distiller, batch: Any) -> tuple[dict[str, float], torch.Tensor]:
    distiller.zero_grad()
    found = distiller(batch)
    distiller.weighted(found).backward()
    every = [weight.grad.flatten() for weight in distiller.parameters() if weight.grad is not None]
    return {name: float(loss.detach()) for name, loss in found.items()}, torch.cat(every)


class LargestLogits(TorchDispatchMode):
    """Records the largest number of rows of any float tensor with a column for each piece."""

    def __init__(self, pieces: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces, self.most = pieces, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            number = isinstance(each, torch.Tensor) and each.is_floating_point()
            if number and self.pieces in each.shape:
                self.most = max(self.most, each.numel() // self.pieces)
        return found


@pytest.mark.parametrize(
    ("tier", "losses"), [("head", ("kl-next", "reverse-kl")), ("topk:599", ("kl-next",))]
)
def test_the_teachers_vocabulary_gives_ordinary_distillation(
    stores: Stores, tiny_teacher: Teachers, tier: str, losses: tuple[str, ...]
) -> None:
    """KL, reverse KL and the gradient equal dense logits', at all tokens after the first."""
    words: dict[str, Any] = {"student": "llama:32x1x4", "batch_tokens": 512}
    batches = StudentBatches(stores(tier), "teacher", loss=dict.fromkeys(losses, 1.0), **words)
    distiller, batch = distiller_of(batches), next(iter(batches))
    found, gradient = gradients(distiller, batch)
    teacher: Any = AutoModelForCausalLM.from_pretrained(tiny_teacher("gpt2"))
    ids, present = batch.inputs.ids, batch.inputs.present
    asked = present[:, 1:]
    with torch.no_grad():
        p = teacher(ids, attention_mask=present.long()).logits[:, :-1][asked].log_softmax(dim=1)
    distiller.zero_grad()
    own = distiller.student(ids, attention_mask=present.long()).logits[:, :-1][asked]
    q = own.log_softmax(dim=1)
    wanted = {
        "kl-next": (p.exp() * (p - q)).sum(dim=1).mean(),
        "reverse-kl": (q.exp() * (q - p.clamp(min=-20))).sum(dim=1).mean(),
    }
    torch.stack([wanted[name] for name in losses]).sum().backward()
    for name in losses:
        assert found[name] == pytest.approx(float(wanted[name].detach()), abs=1e-4), name
    dense = torch.cat([w.grad.flatten() for w in distiller.parameters() if w.grad is not None])
    assert float((gradient - dense).norm() / dense.norm()) < 1e-3


@pytest.mark.parametrize("vocab", ["teacher", "400"])
def test_slices_change_nothing_and_no_tensor_has_a_logit_of_every_token(
    store: Path, vocab: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: dict[str, Any] = {"student": "llama:32x1x4", "batch_tokens": 1024, "loss": LOSSES}
    batches = StudentBatches(store, vocab, **words)
    distiller, batch = distiller_of(batches), max(batches, key=lambda each: each.tokens)
    size, most = len(batches.tokenizer), len(batch.labels)
    with LargestLogits(size) as at_once:
        losses, gradient = gradients(distiller, batch)
    monkeypatch.setitem(next_tokens.MOST_LOGITS, "cpu", 128 * size)
    with LargestLogits(size) as sliced:
        again, other = gradients(distiller, batch)
    assert 500 < at_once.most <= most and sliced.most == 128
    assert again == pytest.approx(losses, rel=1e-5) and set(losses) == set(LOSSES)
    assert float((gradient - other).norm() / gradient.norm()) < 1e-5


@pytest.mark.slow
def test_processes_send_batches_without_the_head(store: Path) -> None:
    batches = StudentBatches(store, "teacher", student="llama:32x1x4", loss={"kl-next": 1.0})
    parts = batches.store, batches.collator, batches._blocks
    order = BatchOrder(*parts, 0, 0, {"batch_tokens": 256})
    with closing(prepared_batches(order, 1)) as made:
        targets = [next(made).aligned["bytes"].head for _ in range(3)]
    assert batches.collator.distributions.whole is not None
    assert all(
        each is not None and each.head is batches.collator.distributions.whole for each in targets
    )
