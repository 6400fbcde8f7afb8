"""How good a student is on the held-out part of the store."""

from __future__ import annotations

from collections.abc import Callable

import torch

from store import FeatureStore
from student_train.data.batch import StudentBatch
from student_train.data.collator import Collator
from student_train.data.stream import view_of
from student_train.data.targets import TaskTargets
from student_train.losses.registry import losses_for
from student_train.losses.task import NO_LABEL
from student_train.settings.options import TrainOptions
from student_train.train.distiller import Distiller
from support.arrays import Array

Measured = tuple[dict[str, torch.Tensor], torch.Tensor | None]
"""Losses by name, and the logits of a task; see `Distiller.measured`."""


@torch.no_grad()
def evaluate(
    distiller: Distiller,
    store: FeatureStore,
    collator: Collator,
    blocks: Array,
    options: TrainOptions,
    measured: Callable[[StudentBatch], Measured] | None = None,
) -> dict[str, float]:
    """Validation losses over `blocks`, with masks that are the same for every student and step.

    `valid_NAME` is the mean over batches of loss NAME (of `mlm` over masked tokens, of `ce` over
    gold labels, absent where there is none), `valid_loss` their weighted sum;
    `valid_mlm_per_character` is the masked-LM loss summed over masked tokens and divided by the
    characters they cover (nats), which compares students with different vocabularies. For a task:
    `valid_accuracy` is the share of the gold labels that the student gives, `valid_agreement` of
    the teacher's best ones, at all pieces that it learns from. Empty if there are no blocks.
    """
    if not len(blocks):
        return {}
    was_training = distiller.training
    distiller.eval()
    device = next(distiller.parameters()).device
    losses = losses_for(distiller.for_task, options.loss)
    of_gold = {loss.name for loss in losses if loss.teacher == "gold"}
    sums: dict[str, float] = {}
    nats = masked = characters = count = labels = 0.0
    judged: list[tuple[torch.Tensor, TaskTargets]] = []
    view = view_of(0, store.features, options.view)
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
        found, logits = (measured or distiller.measured)(batch)
        count += 1
        taught = batch.distillation.task if batch.distillation else None
        labelled = int((taught.gold != NO_LABEL).sum()) if taught else 0
        labels += labelled
        for name, value in found.items():
            share = labelled if name in of_gold else 1
            sums[name] = sums.get(name, 0.0) + float(value) * share
        if "mlm" in found:
            nats += float(found["mlm"]) * len(batch.labels)
            masked += len(batch.labels)
            characters += batch.characters
        if taught and logits is not None:
            judged.append((logits, taught))
    distiller.train(was_training)
    means = {name: value / count for name, value in sums.items() if name not in of_gold}
    if labels:
        means |= {name: value / labels for name, value in sums.items() if name in of_gold}
    if masked:
        means["mlm"] = nats / masked
    result = {f"valid_{name}": value for name, value in means.items()}
    result["valid_loss"] = sum(options.loss[name] * value for name, value in means.items())
    if characters:
        result["valid_mlm_per_character"] = nats / characters
    return result | (_right(judged) if judged else {})


def _right(judged: list[tuple[torch.Tensor, TaskTargets]]) -> dict[str, float]:
    best = torch.cat([logits.argmax(dim=1) for logits, _ in judged])
    gold = torch.cat([targets.gold for _, targets in judged])
    found, known = {}, gold != NO_LABEL
    if known.any():
        found["valid_accuracy"] = float((best == gold)[known].float().mean())
    if judged[0][1].logits is not None:
        teacher = torch.cat([t.logits.argmax(dim=1) for _, t in judged if t.logits is not None])
        found["valid_agreement"] = float((best == teacher).float().mean())
    return found
