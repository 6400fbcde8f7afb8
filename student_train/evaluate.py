"""How good a student is on the held-out part of the store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from store import FeatureStore
from student_train.batches import Collator, StudentBatch
from student_train.data import view_of
from student_train.options import TrainOptions
from student_train.student import Distiller


@torch.no_grad()
def evaluate(
    distiller: Distiller,
    store: FeatureStore,
    collator: Collator,
    blocks: np.ndarray,
    options: TrainOptions,
    forward: Callable[[StudentBatch], dict[str, torch.Tensor]] | None = None,
) -> dict[str, float]:
    """Validation losses over `blocks`, with masks that are the same for every student and step.

    `valid_NAME` is the mean over batches of loss NAME, `valid_loss` their weighted sum;
    `valid_mlm_per_character` is the masked-LM loss summed over masked tokens and divided by the
    characters they cover (nats), which compares students with different vocabularies. Empty if
    there are no blocks.
    """
    if not len(blocks):
        return {}
    was_training = distiller.training
    distiller.eval()
    device = next(distiller.parameters()).device
    sums: dict[str, float] = {}
    nats = masked = characters = count = 0.0
    view = view_of(0, store.features.views, options.view)
    batches = store.stream(
        0,
        0,
        options.batch_tokens,
        view=view,
        blocks=blocks,
        features=collator.features(),
        shuffle=False,
    )
    for number, raw in enumerate(batches):
        batch = collator(raw, view, (0, 0, number, 1)).to(device)
        found = (forward or distiller)(batch)
        count += 1
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        if "mlm" in found:
            nats += float(found["mlm"]) * len(batch.labels)
            masked += len(batch.labels)
            characters += batch.characters
    distiller.train(was_training)
    means = {name: value / count for name, value in sums.items()}
    if masked:
        means["mlm"] = nats / masked
    result = {f"valid_{name}": value for name, value in means.items()}
    result["valid_loss"] = sum(options.loss[name] * value for name, value in means.items())
    if characters:
        result["valid_mlm_per_character"] = nats / characters
    return result
