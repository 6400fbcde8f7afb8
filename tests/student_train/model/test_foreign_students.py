"""Masked LMs of other types, given to `train`, learn, or a line names the types that do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from teachonce.store import FeatureStore
from teachonce.student_train.model.any_student import class_logits, head_of, lm_logits
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from tests.student_train.support import first_batch, prepared

SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "distilbert": {
        "vocab_size": 500,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 32,
        "pad_token_id": 0,
    },
    "albert": {**SMALL, "embedding_size": 8},
    "deberta": {**SMALL, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "deberta-v2": {**SMALL, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "electra": {**SMALL, "embedding_size": 8},
    "roberta": SMALL,
}


def made(kind: str, factory: Any = AutoModelForMaskedLM) -> Any:
    torch.manual_seed(0)
    return factory.from_config(AutoConfig.for_model(kind, **TYPES[kind]))


@pytest.mark.parametrize("kind", TYPES)
def test_the_head_of_any_masked_lm_gives_its_logits(kind: str) -> None:
    student = made(kind).eval()
    ids = torch.randint(5, 500, (2, 9))
    with torch.no_grad():
        states = student.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        expected = student(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        found = lm_logits(student, states.flatten(0, 1))
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-5, atol=1e-6)
    assert head_of(student) == "mlm"


@pytest.mark.parametrize("kind", TYPES)
def test_it_learns(kind: str, store: FeatureStore) -> None:
    losses = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0}
    few = {"steps": 12, "batch_tokens": 256, "lr": 5e-3}
    _, collator, options = prepared(store, vocab="500", loss=losses, **few)
    seen: list[float] = []
    student = made(kind)
    train(store, student, collator, options, on_step=lambda _, found: seen.append(found["loss"]))
    assert sum(seen[-3:]) < sum(seen[:3])


def test_what_can_be_no_student_is_refused_in_a_line(store: FeatureStore) -> None:
    _, collator, options = prepared(store, vocab="500", steps=1)
    for factory in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(UserError, match="cannot be a student: expected a masked LM of transf"):
            train(store, made("albert", factory), collator, options)
    with pytest.raises(UserError, match="deberta cannot be trained in bf16.* use precision fp32"):
        train(store, made("deberta"), collator, replace(options, precision="bf16"))
    with pytest.raises(UserError, match="type albert can be trained as a masked LM only"):
        class_logits(made("albert"), torch.zeros(1, 16), torch.ones(1, 1, dtype=torch.bool))


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of a store for one epoch of an external training loop."""

    def __init__(self, store: FeatureStore, collator: Any) -> None:
        self.store, self.collator = store, collator

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, raw in enumerate(self.store.stream(0, 0, 256)):
            yield self.collator(raw, 0, (0, 0, number)).masked_lm()


def test_a_batch_in_the_trainer_of_transformers(store: FeatureStore, tmp_path: Path) -> None:
    student, collator, options = prepared(store, vocab="500", steps=1, loss={"mlm": 1.0})
    batch = first_batch(store, collator, 256)
    ours = Distiller.of(student, options, store)(batch)["mlm"]
    theirs = student(**batch.masked_lm()).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_steps=1,
    )  # fmt: skip
    trainer = OneBatchAtATime(student, arguments, train_dataset=Batches(store, collator))
    trainer.train()
    assert len([row for row in trainer.state.log_history if row.get("loss", 0) > 0]) == 3


class OneBatchAtATime(Trainer):
    """The dataset yields complete batches."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None)  # type: ignore[arg-type]
