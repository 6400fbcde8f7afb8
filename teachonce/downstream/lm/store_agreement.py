"""Compares a decoder's predictions of next tokens with the teacher's predictions in a store."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from teachonce.checkpoints.first_token import prepend_token, prepended_token
from teachonce.checkpoints.loading import input_limit
from teachonce.downstream.lm.windows import start_token
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.losses.logits import kl
from teachonce.student_train.losses.next_token import NextTargets
from teachonce.support.errors import UserError

POSITIONS = 50_000
"""Number of predictions to compare: batches of the store are read in random order until it is
reached."""
STUDENT = "llama:64x1x1"  # any decoder: `StudentBatches` reads only its kind, and no model is made
MEASURES = {"agreement with the store": "agreement", "KL, nats": "kl"}


@torch.inference_mode()
def store_agreement(network: Any, tokenizer: Any, path: Path) -> dict[str, float]:
    """Compare a decoder with the teacher of a store, wherever tokens of both end at the same byte.

    agreement: the share of positions at which the decoder's best next token is the first token of
        its own encoding of the teacher's best token.
    kl: KL(teacher || decoder) in nats, over the stored tokens and one outcome for all other tokens.

    Raises UserError for a store that has no next-token logits, or only random draws from them, and
    StoreError for a damaged store.
    """
    store = open_store(path)
    logits = store.features.logits
    if logits is None or not logits.next_token:
        raise UserError(
            f"--store {path}: has no logits of next tokens; give the store of a causal teacher"
            " that was dumped with --logits topk:64"
        )
    if logits.tier == "sample":
        raise UserError(
            f"--store {path}: has random draws of next tokens, which show neither the best token"
            " nor the divergence; give a store that was dumped with --logits topk:64 or head"
        )
    limit = input_limit(network.config, tokenizer)
    batches = StudentBatches(
        store,
        _starting_alike(tokenizer, store),
        device=network.device,
        student=STUDENT,
        loss={"kl-next": 1.0},
        held_out=0.0,
        max_length=min(limit, store.features.max_length),
    )
    positions, equal, nats = 0, 0, 0.0
    with tqdm(total=POSITIONS, desc=str(path), unit="token", disable=None) as bar:
        for batch in batches:
            predicted, targets = _compared(network, batch)
            best = targets.ids.gather(1, targets.logprobs.argmax(dim=1, keepdim=True))[:, 0]
            equal += int((predicted.argmax(dim=1) == best).sum())
            nats += float(kl(predicted, targets, 1.0)) * len(predicted)
            positions += len(predicted)
            bar.update(len(predicted))
            if positions >= POSITIONS:
                break
    if not positions:
        raise UserError(
            f"--store {path}: no token of the model ends at the same character as a token of the"
            " teacher; give a store of longer texts"
        )
    return {"agreement": equal / positions, "kl": nats / positions}


def _starting_alike(tokenizer: Any, store: FeatureStore) -> Any:
    """Return a tokenizer that puts its start token in front of each text, if the store's teacher
    had a start token there (`teacher-dump --bos`)."""
    start = start_token(tokenizer)
    if start is None or prepended_token(store.tokenizer()) is None:
        return tokenizer
    # A copy: `score_lm` uses the caller's tokenizer, and adds the start token to documents itself.
    tokenizer = copy.deepcopy(tokenizer)
    prepend_token(tokenizer, str(start), tokenizer.name_or_path)
    return tokenizer


def _compared(network: Any, batch: StudentBatch) -> tuple[Tensor, NextTargets]:
    """Return the decoder's logits [G,V] at the compared positions of a batch, and the teacher's
    predictions there."""
    present = batch.inputs.present
    output = network(input_ids=batch.inputs.ids, attention_mask=present.long(), use_cache=False)
    aligned = batch.distillation
    assert aligned is not None and aligned.logit_runs is not None
    # With the teacher's vocabulary and its head: all pieces.
    targets = aligned.head.whole() if aligned.head else aligned.logits
    assert isinstance(targets, NextTargets)
    return output.logits[present][aligned.logit_runs.member].float(), targets
