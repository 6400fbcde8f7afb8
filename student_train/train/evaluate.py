"""Validation: how good a student is on the held-out part of the store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import view_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.targets import TaskTargets
from teachonce.student_train.losses.registry import Term
from teachonce.student_train.losses.task import NO_LABEL
from teachonce.student_train.settings.terms import BatchPlan
from teachonce.student_train.train.distiller import Distiller
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.loop import infinite


def evaluate(
    distiller: Distiller,
    store: FeatureStore,
    collator: Collator,
    blocks: Array,
    plan: BatchPlan,
) -> dict[str, float]:
    """Measure the losses of a plan over `blocks`, with masks that never change.

    `valid_NAME` is the mean of loss NAME over batches, but of `mlm` over masked tokens and of `ce`
    over gold labels. It is absent where there are none of these. `valid_loss` is the weighted sum.
    `valid_mlm_per_character` is the masked-LM loss summed over masked tokens and divided by the
    characters they cover (nats). It compares students with different vocabularies. For a task,
    `valid_accuracy` is the share of the gold labels that the student gives, and `valid_agreement`
    the share of the teacher's best ones, at all pieces that it learns from. If a text has several
    labels at once, `valid_agreement` is the share of yes and no for each label that equal the
    teacher's. Of scores and other numbers, `valid_spearman` is the rank correlation with the
    teacher's, the mean over the outputs. The result is empty if there are no blocks.
    """
    batches = held_out(store, collator, blocks, plan) if len(blocks) else ()
    return evaluate_batches(distiller, batches, plan.terms)


@torch.no_grad()
def evaluate_batches(
    distiller: Distiller,
    batches: Iterable[StudentBatch],
    terms: Sequence[Term],
) -> dict[str, float]:
    """Measure the losses over batches; see `evaluate`."""
    was_training = distiller.training
    distiller.eval()
    device = next(distiller.parameters()).device
    sums, found = _Sums(terms), False
    for batch in batches:
        moved, found = batch.to(device), True
        sums.add(moved, *distiller.measured(moved, terms))
    distiller.train(was_training)
    return sums.figures() if found else {}


def check_validation(found: dict[str, float], step: int) -> None:
    """Raise UserError if the loss of held-out texts is not finite: no student is right then."""
    loss = found["valid_loss"]
    if not math.isfinite(loss):
        raise UserError(
            f"step {step}: the loss of the held-out texts is not finite ({infinite(found)}"
            f"valid_loss {loss:g}); the store's values for them are too large, or training has"
            " diverged: leave that loss out, make the store again, or lower --lr"
        )


def held_out(
    store: FeatureStore, collator: Collator, blocks: Array, plan: BatchPlan
) -> Iterator[StudentBatch]:
    """Yield the batches of some blocks, in the order of the store, under masks that never
    change."""
    view = view_of(0, store.features, plan.view)
    batches = store.stream(
        0,
        0,
        **plan.batching,
        view=view,
        blocks=blocks,
        features=collator.features(),
        shuffle=False,
    )
    for number, raw in enumerate(batches):
        yield collator(raw, view, (0, 0, number, 1))


class _Sums:
    """Sums losses over batches. A batch counts once; for a loss of masked tokens or of gold labels
    it counts as often as it has these."""

    def __init__(self, terms: Iterable[Term]) -> None:
        # Losses of gold come last: the order of the sum decides the last bits of `valid_loss`.
        self.terms = sorted(terms, key=lambda term: term.loss.of_gold)
        self.sums = dict[str, float]()
        self.counts = dict[str, float]()
        self.characters = 0
        self.judged: list[tuple[torch.Tensor, TaskTargets]] = []

    def add(
        self, batch: StudentBatch, found: Mapping[str, torch.Tensor], logits: torch.Tensor | None
    ) -> None:
        """Count a batch's losses by name, and the logits of its task."""
        taught = batch.aligned[batch.of_task].task if batch.of_task else None
        labels = int((taught.gold != NO_LABEL).sum()) if taught else 0
        for term in self.terms:
            name, loss = term.name, term.loss
            if name in found:
                count = len(batch.labels) if loss.of_masked else labels if loss.of_gold else 1
                self.sums[name] = self.sums.get(name, 0.0) + float(found[name]) * count
                self.counts[name] = self.counts.get(name, 0.0) + count
        self.characters += batch.characters
        if taught and logits is not None:
            self.judged.append((logits, taught))

    def figures(self) -> dict[str, float]:
        """Return the figures of `evaluate`."""
        counted = [term for term in self.terms if self.counts.get(term.name)]
        means = {term.name: self.sums[term.name] / self.counts[term.name] for term in counted}
        result = {f"valid_{name}": value for name, value in means.items()}
        result["valid_loss"] = sum(term.weight * means[term.name] for term in counted)
        if self.characters:
            result |= {
                f"valid_{term.name}_per_character": self.sums[term.name] / self.characters
                for term in counted
                if term.loss.of_masked
            }
        return result | (_right(self.judged) if self.judged else {})


def _right(judged: list[tuple[torch.Tensor, TaskTargets]]) -> dict[str, float]:
    if judged[0][0].shape[1] == 1 or judged[0][1].answers == "numbers":
        return _ranked(judged)
    if judged[0][1].answers == "several labels":
        same = [(own > 0) == (t.logits > 0) for own, t in judged if t.logits is not None]
        return {"valid_agreement": float(torch.cat(same).float().mean())} if same else {}
    best = torch.cat([logits.argmax(dim=1) for logits, _ in judged])
    gold = torch.cat([targets.gold for _, targets in judged])
    found, known = {}, gold != NO_LABEL
    if known.any():
        found["valid_accuracy"] = float((best == gold)[known].float().mean())
    if judged[0][1].logits is not None:
        teacher = torch.cat([t.logits.argmax(dim=1) for _, t in judged if t.logits is not None])
        found["valid_agreement"] = float((best == teacher).float().mean())
    return found


def _ranked(judged: list[tuple[torch.Tensor, TaskTargets]]) -> dict[str, float]:
    """Return the rank correlation of the student's numbers of all texts with the teacher's, the
    mean over the outputs; nothing if an output gives all texts one number."""
    from scipy.stats import spearmanr

    if judged[0][1].logits is None:
        return {}
    own = torch.cat([logits for logits, _ in judged]).float().cpu().numpy().T
    teacher = torch.cat([t.logits for _, t in judged if t.logits is not None]).cpu().numpy().T
    if own.shape[1] < 2 or not (own.std(axis=1) * teacher.std(axis=1)).all():
        return {}
    found = [spearmanr(one, other).statistic for one, other in zip(own, teacher, strict=True)]
    return {"valid_spearman": float(sum(found) / len(found))}
