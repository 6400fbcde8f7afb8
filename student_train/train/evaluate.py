"""Validation of a student on the held-out blocks of a store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from teachonce.store import FeatureStore
from teachonce.store.format.features import OutputKind
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import view_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.task_targets import TaskTargets
from teachonce.student_train.losses import registry
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.losses.task import NO_LABEL
from teachonce.student_train.plan.train_plan import Stage, StoreSplit, TrainPlan
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.sides import VECTORS
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.label_measures import matthews
from teachonce.training.loop import nonfinite_parts


def evaluate(
    distiller: Distiller,
    store: FeatureStore,
    collator: Collator,
    blocks: Array,
    plan: BatchPlan,
) -> dict[str, float]:
    """Compute the losses of a plan over `blocks`, with fixed masks. Returns {} without blocks.

    valid_NAME: the mean of loss NAME over the batches in which it compares something; `mlm` over
        masked tokens, `next` over tokens, `ce` over gold labels. Absent if no batch has anything to
        compare.
    valid_loss: the weighted sum of all valid_NAME; absent if there is no valid_NAME.
    valid_mlm_per_character: the masked-LM loss summed over masked tokens, divided by their number
        of characters (nats); comparable between vocabularies.
    valid_bits_per_byte: the loss `next` summed over the tokens that have a token before them,
        divided by their bytes and ln 2; comparable between vocabularies. Given for every decoder,
        if it predicts any token.
    valid_accuracy: for a task, the share of gold labels that the student predicts.
    valid_agreement: the share of texts or tokens with the teacher's best label; for several labels
        per text the share of equal decisions, label by label.
    valid_accuracy_matthews, valid_agreement_matthews: Matthews' correlation of the student's labels
        with the gold ones, and with the teacher's. It is 0 for a student that gives everything the
        same label, such as O to every token, where the share is high.
    valid_spearman: for scores and other numbers, the rank correlation with the teacher's, mean over
        the outputs. For text vectors, the rank correlation of the cosines between the student's
        vectors with those between the teacher's, over all pairs of the first 1,000 held-out texts.
    states_varying: see `StateSpread`; measured on the states that losses compare, or on those of
        the last layer if no loss compares states.
    """
    batches = held_out(store, collator, blocks, plan) if len(blocks) else ()
    return evaluate_batches(distiller, batches, plan)


@torch.no_grad()
def evaluate_batches(
    distiller: Distiller,
    batches: Iterable[StudentBatch],
    plan: BatchPlan,
) -> dict[str, float]:
    """Compute the losses of a plan over batches; see `evaluate`."""
    terms = plan.validated
    was_training = distiller.training
    distiller.eval()
    device = next(distiller.parameters()).device
    sums, has_batches = _Sums(terms), False
    try:
        for batch in batches:
            moved, has_batches = batch.to(device), True
            computed = distiller.compute(moved, terms)
            sums.add(moved, computed.losses, computed.task_logits)
            sums.spread.add(computed.states)
            if moved.vectors is not None and VECTORS in computed.states:
                sums.vectors.add(computed.states[VECTORS], moved.vectors)
    finally:  # after Ctrl-C in a notebook, the next step must have its dropout
        distiller.train(was_training)
    return sums.figures() if has_batches else {}


def count_compared(batch: StudentBatch, term: Term) -> int:
    """Count what a loss compares in a batch: tokens, gold labels, runs or texts; 0 if it compares
    texts with one another and the batch has only one."""
    if term.loss.per_prediction:
        return len(batch.labels)
    if term.loss.of_gold:
        task = batch.aligned[batch.of_task].task if batch.of_task else None
        return int((task.gold != NO_LABEL).sum()) if task else 0
    count = len(batch.inputs.ids)
    if term.alignment:
        count = batch.aligned[term.alignment].count_runs(term.loss.student)
    return 0 if term.loss.of_pairs and count < 2 else count


def check_held_out(plan: TrainPlan, collators: Sequence[Collator]) -> str:
    """Return a warning if the losses of a stage compare nothing in the held-out part of a store,
    else "". Raises UserError if the stage depends on its validation, or if its losses compare
    nothing in the training part, either."""
    warning = ""
    for stage, (source, collator) in product(
        plan.stages, zip(plan.sources, collators, strict=True)
    ):
        if not len(source.held_out) or _compares(stage, source, collator, source.held_out):
            continue
        terms = stage.validation.validated
        names = ", ".join(term.name for term in terms if term.weight)
        of_masks = any(term.loss.student == "masked" for term in terms)
        remedy = "raise --max-length" if not of_masks else "raise --mask-prob"
        compared = (
            f"compares nothing in the first {collator.max_length} student tokens of each sequence"
        )
        if all(term.loss.of_pairs for term in terms if term.weight):
            remedy = "raise --batch-texts" if stage.options.batch_texts else "raise --batch-tokens"
            compared = "compares the texts of a batch, and there is only one in each batch"
        where = getattr(source.store, "path", "the store")
        if not _compares(stage, source, collator, source.blocks(stage.validation)):
            raise UserError(f"--loss {names}: {compared} of {where}; {remedy}")
        problem = f"--loss {names} {compared} in the held-out part of {where}"
        remedy += " or --held-out"
        if judged := stage.options.judged_by():
            raise UserError(f"{judged[0]}: {problem}; {remedy}, or leave {judged[0]} out")
        warning = warning or f"warning   no valid_loss: {problem}; {remedy}"
    return warning


def _compares(stage: Stage, source: StoreSplit, collator: Collator, blocks: Array) -> bool:
    """Return whether the losses of a stage compare something in these blocks."""
    plan = stage.validation
    terms = [term for term in plan.validated if term.weight]
    batches = held_out(source.store, collator.serving(plan), blocks, plan)
    return any(count_compared(batch, term) for batch in batches for term in terms)


def check_validation(figures: dict[str, float], step: int) -> None:
    """Raise UserError if the held-out loss is not finite."""
    loss = figures["valid_loss"]
    if not math.isfinite(loss):
        raise UserError(
            f"step {step}: the held-out loss is not finite ({nonfinite_parts(figures)}valid_loss"
            f" {loss:g}): the teacher's values in the store are too large, or the training has"
            " diverged; leave out the loss that is not finite, make the store again, or lower --lr"
        )


def held_out(
    store: FeatureStore, collator: Collator, blocks: Array, plan: BatchPlan
) -> Iterator[StudentBatch]:
    """Yield the batches of blocks in store order, with fixed masks."""
    view = view_of(0, store.features, plan.options.view)
    batches = store.stream(
        0,
        0,
        **plan.options.batching,
        view=view,
        blocks=blocks,
        features=collator.features(),
        shuffle=False,
    )
    for number, raw in enumerate(batches):
        # Keys of training batches have three numbers: no training draws these masks.
        yield collator.for_validation(raw, view, (0, 0, number, 1))


VARYING = "states_varying"
STATES = ("hidden", "embedding")  # features of losses that compare states
CONSTANT = 0.02  # of compared states: healthy students have .16 to .79, collapsed .000 to .006
# For states of the last layer, which have a large common part in some models: their mean cosine is
# .99 in a GPT-2 (Ethayarajh 2019, figure 1), so that only .01 varies.
CONSTANT_LAST = 0.002


class StateSpread:
    """Measures how much a student's states vary, over batches.

    The figure is the variance of the states divided by their mean squared length: 0 if all states
    are equal. Training can end there: if a projection's initial scale is too large for the
    teacher's states, a student that always returns their mean has the lowest loss.
    """

    def __init__(self) -> None:
        self.counts = dict[str, int]()
        self.sums = dict[str, torch.Tensor]()
        self.squares = dict[str, float]()

    def add(self, states: Mapping[str, torch.Tensor]) -> None:
        """Add states [G,D], by name."""
        for name, values in states.items():
            # The share is a small difference of two large sums, which float32 would lose.
            values = values.double()
            self.counts[name] = self.counts.get(name, 0) + len(values)
            total = values.sum(dim=0)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.squares[name] = self.squares.get(name, 0.0) + float(values.square().sum())

    def figures(self) -> dict[str, float]:
        """Return the smallest figure of all states, by the name `states_varying`; {} without
        states."""
        shares = [
            max(0.0, 1 - float((self.sums[name] / count).square().sum()) / (square / count))
            for name, count in self.counts.items()
            if count > 1 and (square := self.squares[name]) > 0
        ]
        return {VARYING: min(shares)} if shares else {}


def warning_of_constant_states(figures: Mapping[str, float], options: TrainOptions) -> str:
    """Return a warning if a student's states hardly vary, else ""."""
    share = figures.get(VARYING)
    losses = registry.named(options.losses())
    compared = [loss.name for loss in losses if loss.feature in STATES]
    if share is None or share >= (CONSTANT if compared else CONSTANT_LAST):
        return ""
    remedies = ["a smaller --lr"]
    if compared:
        settings = {"--projection-start pytorch": options.projection_start != "pytorch"}
        settings |= {"--projection trainable": options.projection == "frozen"}
        remedies = [option for option, differs in settings.items() if differs]
        remedies.append(f"a smaller weight of {' and '.join(compared)}")
    return (
        f"states    {share:.2%} of the squared length of the student's states varies (healthy: over"
        " 10%): they are nearly constant, and the student learns little of the teacher; give"
        f" {' or '.join(remedies)}"
    )


class _Sums:
    """Sums losses over batches. A batch has the weight 1; for a loss on predicted tokens or gold
    labels, it has their number as weight."""

    def __init__(self, terms: Iterable[Term]) -> None:
        # Losses on gold labels come last: the order of the sum decides the last bits of valid_loss.
        self.terms = sorted(terms, key=lambda term: term.loss.of_gold)
        self.sums = dict[str, float]()
        self.counts = dict[str, float]()
        self.characters, self.bytes = 0.0, 0
        self.answers: list[_Answers] = []
        self.spread = StateSpread()
        self.vectors = _VectorPairs()

    def add(
        self, batch: StudentBatch, losses: Mapping[str, torch.Tensor], logits: torch.Tensor | None
    ) -> None:
        """Add a batch's losses by name, and the logits of its task."""
        targets = batch.aligned[batch.of_task].task if batch.of_task else None
        for term in self.terms:
            name, loss = term.name, term.loss
            if name in losses:
                count = count_compared(batch, term)
                weight = count if loss.per_prediction or loss.of_gold else min(1, count)
                self.sums[name] = self.sums.get(name, 0.0) + float(losses[name]) * weight
                self.counts[name] = self.counts.get(name, 0.0) + weight
        self.characters += batch.characters
        self.bytes += batch.predicted_bytes
        if targets and logits is not None:
            self.answers.append(_Answers.of(logits, targets))

    def figures(self) -> dict[str, float]:
        counted = [term for term in self.terms if self.counts.get(term.name)]
        means = {term.name: self.sums[term.name] / self.counts[term.name] for term in counted}
        result = {f"valid_{name}": value for name, value in means.items()}
        if any(term.weight for term in counted):  # a decoder's `next` may be a figure alone
            result["valid_loss"] = sum(term.weight * means[term.name] for term in counted)
        if self.characters:
            result |= {
                f"valid_{term.name}_per_character": self.sums[term.name] / self.characters
                for term in counted
                if term.loss.student == "masked"
            }
        if self.bytes and "next" in self.sums:
            result["valid_bits_per_byte"] = self.sums["next"] / self.bytes / math.log(2)
        result |= self.spread.figures() | self.vectors.figures()
        return result | (_compared(self.answers) if self.answers else {})


# The correlation of a few texts is chance, and a sweep would rank by it. 1,000 texts have 499,500
# pairs, which are ranked in a fifth of a second at each validation.
LEAST_TEXTS, MOST_TEXTS = 30, 1000


class _VectorPairs:
    """Holds, on the CPU, the text vectors of a student and its teacher for the first texts."""

    def __init__(self) -> None:
        self.student, self.teacher = list[torch.Tensor](), list[torch.Tensor]()
        self.texts = 0

    def add(self, student: torch.Tensor, teacher: torch.Tensor) -> None:
        """Add the vectors of the same texts, [B,D] and [B,W]."""
        room = MOST_TEXTS - self.texts
        for batches, vectors in ((self.student, student), (self.teacher, teacher)):
            batches.append(vectors[:room].float().cpu())
        self.texts += len(self.student[-1])

    def figures(self) -> dict[str, float]:
        """Return the rank correlation of the cosines of all pairs of texts as `valid_spearman`; {}
        if there are fewer than LEAST_TEXTS texts, or if all cosines of one side are equal."""
        if self.texts < LEAST_TEXTS:
            return {}
        return _ranked(_cosines(self.student), _cosines(self.teacher))


def _cosines(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Compute the cosine of each pair of texts, [P,1], from batches of vectors."""
    unit = torch.nn.functional.normalize(torch.cat(vectors), dim=1)
    one, other = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[one, other, None]


@dataclass(frozen=True)
class _Answers:
    """Holds, on the CPU, the answers of a student and its teacher for G texts or tokens.

    student, teacher: for `one label` the best label [G]; for `several labels` which labels are
        given, bool [G,C]; for `numbers` the numbers, float32 [G,C]. teacher: None if it has no
        logits.
    gold: int64 [G].
    """

    # Not the logits: for a tagger of 20 labels, student's and teacher's logits took 160 bytes of
    # the device for each held-out token.
    output_kind: OutputKind
    student: torch.Tensor
    teacher: torch.Tensor | None
    gold: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, task: TaskTargets) -> _Answers:
        """Take the answers from the student's logits [G,C] and the targets."""
        kind: OutputKind = "numbers" if logits.shape[1] == 1 else task.output_kind
        teacher = None if task.logits is None else _answers(task.logits, kind)
        return cls(kind, _answers(logits, kind), teacher, task.gold.cpu())


def _answers(logits: torch.Tensor, kind: OutputKind) -> torch.Tensor:
    if kind == "numbers":
        return logits.float().cpu()
    return (logits > 0 if kind == "several labels" else logits.argmax(dim=1)).cpu()


def _compared(answers: list[_Answers]) -> dict[str, float]:
    """Return the figures that compare the student's answers with gold labels and the teacher."""
    kind, student = answers[0].output_kind, torch.cat([a.student for a in answers])
    teachers = [a.teacher for a in answers if a.teacher is not None]
    teacher = torch.cat(teachers) if teachers else None
    if kind == "numbers":
        return {} if teacher is None else _ranked(student, teacher)
    if kind == "several labels":
        return {} if teacher is None else {"valid_agreement": _share(student, teacher)}
    gold = torch.cat([a.gold for a in answers])
    result, labelled = dict[str, float](), gold != NO_LABEL
    if labelled.any():
        result |= _same_labels("valid_accuracy", student[labelled], gold[labelled])
    return result if teacher is None else result | _same_labels("valid_agreement", student, teacher)


def _share(student: torch.Tensor, reference: torch.Tensor) -> float:
    return float((student == reference).float().mean())


MATTHEWS = "_matthews"


def _same_labels(name: str, student: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Return the share of equal labels [G], and their Matthews' correlation; {} without labels."""
    if not len(student):
        return {}
    correlation = matthews(reference.numpy(), student.numpy())
    return {name: _share(student, reference), f"{name}{MATTHEWS}": correlation}


def warning_of_one_label(figures: Mapping[str, float]) -> str:
    """Return a warning if all held-out labels of the student, or all teacher's or gold labels, are
    the same, else ""."""
    for name, other in (("valid_agreement", "teacher's"), ("valid_accuracy", "gold ones")):
        if figures.get(f"{name}{MATTHEWS}") == 0:
            return (
                f"warning   {name}{MATTHEWS} is 0: on the held-out part all labels of the student"
                f" are the same (raise --lr or --epochs), or the {other} are"
            )
    return ""


def _ranked(student: torch.Tensor, teacher: torch.Tensor) -> dict[str, float]:
    """Return the rank correlation with the teacher's numbers [G,C], mean over the outputs, or {} if
    an output is constant."""
    # Imported here: scipy.stats takes a second, and few students need it.
    from scipy.stats import spearmanr

    predicted, expected = student.numpy().T, teacher.numpy().T
    if predicted.shape[1] < 2 or not (predicted.std(axis=1) * expected.std(axis=1)).all():
        return {}
    rhos = [spearmanr(p, e).statistic for p, e in zip(predicted, expected, strict=True)]
    return {"valid_spearman": float(sum(rhos) / len(rhos))}
