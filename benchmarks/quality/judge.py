"""Scores of a finished student: held-out loss, likeness to the teacher, a task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.store import FeatureStore
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import make_collator
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import evaluate

Tags = tuple[Path, Path]  # word<TAB>tag files to train and to score on
EVAL_TOKENS = 4096
MEASURES = {
    "nats_per_character": "MLM nats/character",
    "mlm": "MLM nats/token",
    "agreement": "agreement with the teacher",
    "kl": "KL to the teacher",
    "tuned": "fine-tuned accuracy (POS)",
}


@torch.no_grad()
def agreement(distiller: Distiller, store: FeatureStore, collator: Any, blocks: Any) -> float:
    """Return the share of held-out masked words (view 1, one teacher token) with equal best
    pieces."""
    agreeing = count = 0
    for number, raw in enumerate(
        store.stream(0, 0, EVAL_TOKENS, view=1, blocks=blocks, features=["logits"], shuffle=False)
    ):
        batch = collator(raw, 1, (0, 0, number, 1)).to(distiller.student.device)
        targets = batch.distillation
        hidden = torch.isin(targets.logit_runs.member, batch.masked)
        states = distiller.encode(batch.inputs).last[targets.logit_runs.member[hidden]]
        logits = targets.logits
        best = logits.logprobs.masked_fill(~logits.valid, -torch.inf).argmax(1, keepdim=True)
        pieces = logits.ids.gather(1, best)[hidden, 0]
        agreeing += int((distiller.logits(states).argmax(1) == pieces).sum())
        count += len(pieces)
    return agreeing / max(1, count)


def judge(
    student: Any, tokenizer: Any, options: TrainOptions, store: FeatureStore
) -> dict[str, float]:
    """Score a student on the held-out part of the store."""
    _, held_out = split_blocks(store, options.held_out)
    scores = {}
    for view, loss in ((0, {"mlm": 1.0}), (1, {"kl": 1.0})):
        judging = replace(
            options,
            align="span",
            targets="all",
            pool=None,
            loss=loss,
            view=view,
            batch_tokens=EVAL_TOKENS,
        )
        distiller = Distiller.of(student, judging, store).eval()
        collator = make_collator(plan_of(judging, store), store, tokenizer)
        losses = evaluate(distiller, store, collator, held_out, BatchPlan(judging, distiller.terms))
        if view == 0:
            scores["mlm"] = losses["valid_mlm"]
            scores["nats_per_character"] = losses["valid_mlm_per_character"]
        else:
            scores["kl"] = losses["valid_kl"]
            scores["agreement"] = agreement(distiller, store, collator, held_out)
    return scores


def tagging(folder: Path, tags: Tags, seed: int) -> dict[str, float]:
    """Return the accuracy on part-of-speech tags after fine-tuning a saved student."""
    train_file, dev_file = tags
    settings = FineTuneSettings(epochs=2, lr=5e-4, seeds=1, seed=seed, limit=1500)
    files = {"train": train_file, "dev": dev_file}
    tuned = fine_tune(PartsOfSpeech("count"), str(folder), files, settings, say=lambda _: None)
    return {"tuned": tuned["mean"]["dev"]["accuracy"]}
