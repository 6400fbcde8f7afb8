"""A teacher in memory in the place of a store: it feeds a training in the store's order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import torch

from teachonce.store import Batch, FeatureStore
from teachonce.store.format.codecs.levels import EXACT
from teachonce.store.read.record import Logits
from teachonce.store.read.stream import HiddenBatch
from teachonce.support.arrays import Array
from teachonce.teacher_dump.teacher.heads import top_logits
from teachonce.teacher_dump.teacher.teacher import Activations, Teacher
from teachonce.teacher_dump.windows.masked_views import DrawKey, MaskVocabulary, masked_input
from teachonce.teacher_dump.windows.window import padded


class OnlineTeacher:
    """Reads the texts of a store in its order, and computes the features with the teacher.

    Only the calibration of `hidden` comes from the store, as it defines the targets of the losses.
    """

    def __init__(self, store: FeatureStore, teacher: Teacher) -> None:
        self.store, self.teacher = store, teacher
        self.features, self.meta, self.task = store.features, store.meta, store.task
        self.blocks, self.batch_count = store.blocks, store.batch_count
        self.seed = store.identity["arguments"]["seed"]
        self.one_at_a_time = Lock()  # training reads ahead in a thread, validation does not

    def stream(self, *order: Any, features: Any = None, **settings: Any) -> Iterator[Batch]:
        """Yield batches as `FeatureStore.stream` does. They always include states and maps."""
        logits = features is None or "logits" in features
        for batch in self.store.stream(*order, features=(), **settings):
            yield self._fed(batch, settings["view"], logits)

    def _fed(self, batch: Batch, view: int, logits: bool) -> Batch:
        rows = [self._read(batch, i, view) for i in range(len(batch))]
        ids, present = padded(rows, self.teacher.tokenizer.pad_token_id)
        with self.one_at_a_time:
            activations = self.teacher.run(ids, present)
        mask = torch.from_numpy(present).to(self.teacher.device)
        hidden = {
            name: HiddenBatch(
                {"values": states[mask].cpu().numpy()}, *self.store.calibration[name], EXACT.hidden
            )
            for name, states in activations.hidden.items()
        }
        maps = {
            name: np.concatenate(
                [
                    m[:n, :n].ravel()
                    for m, n in zip(attention.cpu().numpy(), present.sum(1), strict=True)
                ]
            )
            for name, attention in activations.attention.items()
        }
        return replace(
            batch,
            hidden=hidden,
            logits=self._logits(activations, mask) if logits else None,
            attention=maps,
            stored={f"view{view}/attention/{name}/values": flat for name, flat in maps.items()},
            level=EXACT,
        )

    def _logits(self, activations: Activations, mask: torch.Tensor) -> Logits | None:
        if self.features.logits is None:
            return None
        assert self.teacher.decoder is not None and activations.head_input is not None
        values = activations.head_input[mask]
        with torch.inference_mode():
            top = top_logits(self.teacher.decoder, values, self.features.logits.size)
        return Logits("topk", top["log_partition"], top["ids"], top["logprobs"], top["rest"])

    def _read(self, batch: Batch, i: int, view: int) -> Array:
        tokens = slice(batch.start[i], batch.start[i + 1])
        if view == 0:
            return batch.token_ids[tokens].copy()
        return masked_input(
            batch.token_ids[tokens],
            batch.offsets[tokens],
            batch.special[tokens],
            batch.spans[batch.spans_start[i] : batch.spans_start[i + 1]],
            MaskVocabulary.of(self.teacher.tokenizer),
            DrawKey(self.seed, view, int(batch.index[i])),
        )
