"""The student in training: an ordinary transformers model, the projections that exist only while it
is trained, and both sides of each loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teachonce.checkpoints.sentence_folder import VectorHead
from teachonce.store import Features, FeatureStore
from teachonce.student_train.data.batch import Distillation, Inputs, StudentBatch, pool_members
from teachonce.student_train.data.blocks import output_kind_of
from teachonce.student_train.losses.next_token import ChunkTargets
from teachonce.student_train.losses.registry import Loss, Term
from teachonce.student_train.model.any_student import (
    Outputs,
    class_logits,
    dropped_states,
    forward_pass,
    head_of,
    lm_logits,
    own_projection,
    pooled_tokens,
    sentence_states,
    size_of,
    tag_logits,
)
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.slices import exceeds, mean_in_slices, rows_in_slices, whole
from teachonce.support.errors import UserError

VECTORS = "vectors"  # key of the steps to vectors of texts, among the projections
MEANS = {"mean": 1, "mean0": 0}  # features that average all layers, and the first of these


class Distiller(nn.Module):
    """Holds a student, and a projection for each loss that needs one and each hidden state of a
    teacher. A training updates its parameters.

    student: a model of transformers, or a module of your own (`OwnStudent`).
    terms: the losses that a batch is measured by. Other terms can be given for a batch.
    features: what the store holds of the teacher.
    start: how the projections start: `he`, `pytorch`, or `auto`: He if frozen, else PyTorch's.
    every: terms of all stages, for which projections are made; default: `terms`.
    frozen: the projections retain their random weights.
    separate: `logit` and `log-odds` have an output layer of their own.

    `of` takes all of these from options and a store.
    """

    def __init__(
        self,
        student: Any,
        terms: Sequence[Term],
        features: Features,
        *,
        every: Sequence[Term] = (),
        frozen: bool = False,
        start: str = "auto",
        separate: bool = False,
    ) -> None:
        super().__init__()
        self.student, self.terms = student, tuple(terms)
        self.bf16 = False  # a training sets it; other callers autocast as they need
        # A validation sets it, to collect the states [G,Ds] that losses compare, not projected.
        self.compared: dict[str, Tensor] | None = None
        own, self.layers = size_of(student)
        self.projections = nn.ModuleDict()
        self.projected_losses = set[str]()  # by the student's own projection
        self.every = tuple(every) or self.terms
        for loss in (term.loss for term in self.every):
            if loss.of_text or loss.projection == "none":
                continue
            if loss.projection == "widths differ" and own == features.width:
                continue
            if own_projection(student) is not None:
                self.projected_losses.add(loss.name)
                continue
            for name in features.hidden:
                # A trained projection that starts as PyTorch's leaves .495 of the squared length of
                # a student's states varying after 120 steps, He's start .006.
                self.projections[_key(loss, name)] = _projection(
                    own, features.width, start == "he" or (start == "auto" and frozen)
                )
        read = {term.loss.student for term in self.every}
        self.scores: nn.Module | None = None
        if separate and {"classes", "scores"} <= read:
            # Mukherjee & Awadallah 2019, section 4.1: W^r in addition to W^s.
            classes: Any = student.classifier
            self.scores = nn.Linear(classes.in_features, classes.out_features)
        if of_text := [term for term in self.every if term.loss.of_text]:
            assert features.embedding is not None  # `check` has refused
            self.projections[VECTORS] = self._vector_head(of_text, own, features.embedding.width)

    @property
    def vocabulary(self) -> int:
        """Return the student's number of pieces; 0 for your own module."""
        return int(getattr(getattr(self.student, "config", None), "vocab_size", 0))

    @property
    def vector_head(self) -> VectorHead | None:
        """Return the modules from the student's last states to its text vector, which are a part of
        the finished student. None if no loss uses text vectors."""
        if VECTORS not in self.projections:
            return None
        head = self.projections[VECTORS]
        assert isinstance(head, VectorHead)
        return head

    def share_vector_head(self, other: Distiller) -> None:
        """Use the vector head of another distiller of the same student."""
        if VECTORS in self.projections and VECTORS in other.projections:
            self.projections[VECTORS] = other.projections[VECTORS]

    @staticmethod
    def _vector_head(terms: list[Term], own: int, width: int) -> VectorHead:
        """Make the mean pooling, and a map to the teacher's space if a loss compares with it."""
        from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

        projected = own != width and any(term.loss.projection != "none" for term in terms)
        nested = [width for term in terms for width in term.widths]
        # Without a bias: the mean of states can hold one.
        dense = [Dense(own, width, bias=False, activation_function=None)] if projected else []
        if too_wide := [n for n in nested if n >= (width if projected else own)]:
            raise UserError(
                f"--matryoshka {too_wide[0]}: the student's vectors are"
                f" {width if projected else own} wide; give smaller sizes"
            )
        return VectorHead(Pooling(own, "mean"), *dense, Normalize())

    @classmethod
    def of(cls, student: Any, options: TrainOptions, store: FeatureStore) -> Distiller:
        """Make the distiller of a student from options and a store.

        Raises UserError for a model that can be no student.
        """
        of_text = head_of(student) in ("mlm", "causal")
        output_kind = None if of_text else output_kind_of(store)
        return cls(
            student,
            options.terms(output_kind),
            store.features,
            every=options.every_term(output_kind),
            frozen=options.projection == "frozen",
            start=options.projection_start,
            separate=options.outputs == "separate",
        )

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Compute unweighted losses by name, each a scalar with its own normaliser.

        A loss is missing if the batch has no targets for it.
        """
        return self.measured(batch)[0]

    def measured(
        self, batch: StudentBatch, terms: Sequence[Term] | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute unweighted losses by name, and the logits [G,C] of a task or None.

        terms: the losses to compute, by default the distiller's own.
        """
        device, found = batch.inputs.ids.device.type, dict[str, Tensor]()
        with torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext():
            sides = self.sides(batch, terms)
            for term in sides.terms:
                if (loss := sides.measured(term)) is not None:
                    found[term.name] = loss
            return found, sides.task_logits()

    def sides(self, batch: StudentBatch, terms: Sequence[Term] | None = None) -> Sides:
        """Run the student over a batch, and return the inputs of the losses of `terms`."""
        return Sides(self, batch, self.terms if terms is None else terms)

    def weighted(self, losses: Mapping[str, Tensor], terms: Sequence[Term] | None = None) -> Tensor:
        """Sum losses by name with the weights of their terms: a scalar."""
        weights = {term.name: term.weight for term in (self.terms if terms is None else terms)}
        return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()

    def vectors(self, batch: StudentBatch, read: Outputs) -> Tensor:
        """Compute the student's vectors [B,D] of the texts."""
        head = self.vector_head
        assert head is not None
        # The modules of sentence-transformers take padded batches.
        states = read.last.new_zeros(*read.present.shape, read.last.shape[1])
        states[read.present] = read.last
        present = pooled_tokens(self.student, batch.inputs.ids, batch.inputs.present)
        vectors: Tensor = head(states, present)
        if self.compared is not None:
            self.compared[VECTORS] = vectors.detach()
        return vectors

    def projected(self, loss: Loss, name: str, states: Tensor) -> Tensor:
        """Project student states [G,Ds] to the teacher's hidden size [G,D] for the feature `name`.
        Return them unchanged if the loss needs no projection."""
        own = own_projection(self.student)
        if own is not None and loss.name in self.projected_losses:
            found: Tensor = own(states)
            return found
        key = _key(loss, name)
        return self.projections[key](states) if key in self.projections else states

    def logits(self, states: Tensor) -> Tensor:
        """Return LM-head logits [M,V] of flat states [M,D]."""
        return lm_logits(self.student, states)

    def encode(self, inputs: Inputs, maps: bool = False) -> Outputs:
        """Run the student forward, as `forward_pass` does."""
        return forward_pass(self.student, inputs, maps)

    def counterpart(self, values: list[Tensor], name: str) -> Tensor:
        """Return the student's counterpart of the teacher feature `name`.

        values: tensors by layer, from layer 1. Returns the mean of all layers, the mean of group i
        of N, or the last layer. Raises UserError if N does not divide the number of layers.
        """
        if name in MEANS:
            return torch.stack(values).mean(dim=0)
        group = re.fullmatch(r"groups(\d+)\.(\d+)", name)
        if group is None:
            return values[-1]
        count, i = int(group[1]), int(group[2])
        if len(values) % count:
            raise UserError(
                f"{name}: the student's {len(values)} layers do not fall into {count} groups; give"
                " it another number of layers"
            )
        size = len(values) // count
        return torch.stack(values[i * size : (i + 1) * size]).mean(dim=0)


class Sides:
    """The inputs of every loss for one batch: the student's side and the teacher's.

    The student runs once over the batch, and once more for each alignment with its own input ids.
    terms: the losses that are computed.
    """

    def __init__(self, distiller: Distiller, batch: StudentBatch, terms: Sequence[Term]) -> None:
        if any(wanted.encoded is not None for wanted in batch.aligned.values()):
            raise ValueError("the batch is encoded: call batch.to(device) first")
        self._distiller, self._batch = distiller, batch
        self.terms = tuple(terms)
        maps = any(term.loss.student == "maps" for term in terms)
        own = any(term.loss.of_text_alone for term in terms)
        causal = any(term.loss.of_next for term in terms)
        seconds = [wanted.inputs for wanted in batch.aligned.values()]
        # Left out if nothing reads it: under `reduce` alone the student reads only its second
        # input.
        if own or not seconds or None in seconds or batch.vectors is not None:
            native = distiller.encode(batch.inputs, maps)
        # The order of these decides the last bits of gradients.
        self._native = native.last if own else None
        self._masked = None
        # Of the tokens with a label alone: with 120,000 pieces the head costs as much as the
        # encoder.
        if own and not (causal and exceeds(len(batch.masked), distiller.vocabulary)):
            self._masked = distiller.logits(native.last[batch.masked])
        self._aligned = {
            name: _AlignedSides(
                distiller,
                wanted,
                native if wanted.inputs is None else distiller.encode(wanted.inputs, maps),
            )
            for name, wanted in batch.aligned.items()
        }
        self._vectors = distiller.vectors(batch, native) if batch.vectors is not None else None

    def of(self, term: Term | str) -> list[tuple[Any, ...]]:
        """Return the arguments of a term's formula, a tuple for each teacher feature that it reads.

        A tuple has the student's side and the teacher's; for maps also a mask of the pairs of runs
        that are present; for a loss with temperature also the temperature. The list is empty if the
        batch has no such targets. Raises ValueError for the name of a loss without a weight.
        """
        if isinstance(term, str):
            named = {each.name: each for each in self.terms}
            if term not in named:
                raise ValueError(f"no loss {term!r} is trained; there are {', '.join(named)}")
            term = named[term]
        if term.loss.of_text_alone:
            return [(self._masked, self._batch.labels)]
        if term.loss.of_text:
            if self._vectors is None:
                return []
            parts = [self._vectors, *(self._vectors[:, :n] for n in term.widths)]
            return [(part, self._batch.vectors) for part in parts]
        pairs = self._aligned[term.alignment].of(term)
        return pairs if term.temperature is None else [(*pair, term.temperature) for pair in pairs]

    def measured(self, term: Term) -> Tensor | None:
        """Compute a term's loss, the mean over the teacher's features; None if the batch has no
        targets for it.

        Losses of next tokens with too many logits are computed in slices of places, whose logits
        are computed again in the backward pass.
        """
        size = self._distiller.vocabulary
        if term.loss.of_next and (rows := self._rows(term)) and exceeds(len(rows[0]), size):
            more = () if term.temperature is None else (term.temperature,)
            logits = self._distiller.logits
            return mean_in_slices(lambda s, t: term.measure(logits(s), t, *more), *rows, size)
        if not (pairs := self.of(term)):
            return None
        return reduce(add, (term.measure(*pair) / len(pairs) for pair in pairs))

    def _rows(self, term: Term) -> tuple[Tensor, Any] | None:
        """Return the states [G,D] of which a term compares the logits, and its targets."""
        if term.loss.student == "next":
            assert self._native is not None
            return self._native[self._batch.masked], self._batch.labels
        return self._aligned[term.alignment].rows(term)

    def task_logits(self) -> Tensor | None:
        """Return the student's logits [G,C] for the task, or None without a task."""
        of_task = self._batch.of_task
        return None if of_task is None else self._aligned[of_task].task_logits(self.terms)


class _AlignedSides:
    """The inputs of the losses of one alignment, for one batch."""

    def __init__(self, distiller: Distiller, wanted: Distillation, read: Outputs) -> None:
        self._distiller, self._wanted, self._read = distiller, wanted, read
        self._pieces: Tensor | None = None

    def of(self, term: Term) -> list[tuple[Any, ...]]:
        """Return the student's side and the teacher's for each feature that a term reads; [] if
        the batch has no such targets."""
        loss = term.loss
        match loss.student:
            case "runs" | "sentence":
                return self._of_states(term)
            case "maps":
                return self._of_maps()
            case "pieces" if self._wanted.logit_runs is not None:
                wanted = self._wanted
                targets = wanted.shared if loss.teacher == "shared" else wanted.predicted
                return [(self._logits(term), whole(targets))]
            case "chunks" if self._wanted.chunks is not None:
                chunks = self._wanted.chunks
                return [(self._likelihoods(chunks), chunks.logprobs)]
            case "classes" | "scores" if self._wanted.task is not None:
                task = self._wanted.task
                target = task.gold if loss.teacher == "gold" else task.logits
                own = self.classes if loss.student == "classes" else self.scores
                return [] if target is None else [(own, target)]
        return []

    def task_logits(self, terms: Sequence[Term]) -> Tensor:
        """Return the logits [G,C] by which the student is scored: of its classifier, or, in a stage
        that trains only the separate output, of that output."""
        read = {term.loss.student for term in terms}
        return self.scores if "scores" in read and "classes" not in read else self.classes

    def rows(self, term: Term) -> tuple[Tensor, Any] | None:
        """Return the states [G,D] of which a term compares the logits, and its targets; None if it
        compares other things."""
        runs = self._wanted.logit_runs
        if term.loss.student != "pieces" or runs is None:
            return None
        return runs.pool(self._read.last, term.pool), self._wanted.predicted

    def _of_states(self, term: Term) -> list[tuple[Any, ...]]:
        loss, wanted, distiller, found = term.loss, self._wanted, self._distiller, []
        targets = {
            "normalised": wanted.normalised,
            "raw": wanted.states,
            "sentence": wanted.sentences,
            "raw sentence": wanted.raw_sentences,
        }[loss.teacher]
        for name, target in targets.items():
            if loss.student == "runs":
                states = self._read.states[MEANS.get(name, 1) :]
                layers = distiller.counterpart(states, name)
                own = wanted.runs.pool(layers, term.pool)
            else:
                own = sentence_states(distiller.student, self._read.last, self._read.present)
            if distiller.compared is not None:
                distiller.compared[f"{loss.name} {name}"] = own.detach()
            own = dropped_states(distiller.student, own)
            found.append((distiller.projected(loss, name, own), target))
        return found

    def _of_maps(self) -> list[tuple[Any, ...]]:
        pooling, found = self._wanted.map_pooling, []
        for name, target in self._wanted.maps.items():
            assert pooling is not None
            here = pooling.present
            maps = pooling.pool(self._distiller.counterpart(self._read.maps, name))
            found.append((maps, target, here[:, :, None] & here[:, None, :]))
        return found

    def _logits(self, term: Term) -> Tensor:
        """Compute vocabulary logits [G,V] of the runs with logit targets. Computed once: all terms
        of an alignment have the same pooling."""
        runs, distiller, last = self._wanted.logit_runs, self._distiller, self._read.last
        assert runs is not None
        if self._pieces is None:
            if term.pools_logits:
                logits = distiller.logits(last[runs.member]).float()
                self._pieces = runs.pool_members(logits, term.pool)
            else:
                self._pieces = distiller.logits(runs.pool(last, term.pool))
        return self._pieces

    def _likelihoods(self, chunks: ChunkTargets) -> Tensor:
        """Compute the log-probabilities [G] of the tokens of each run, given those before it."""

        def logprobs(states: Tensor, labels: Tensor) -> Tensor:
            logits = self._distiller.logits(states).float()
            return -functional.cross_entropy(logits, labels, reduction="none")

        states, size = self._read.last[chunks.before], self._distiller.vocabulary
        own = rows_in_slices(logprobs, states, chunks.following, size)
        return pool_members(own[:, None], chunks.begin, "sum")[:, 0]

    @cached_property
    def classes(self) -> Tensor:
        """Compute the task logits [G,C] of texts or tokens."""
        return self._task_output(None)

    @cached_property
    def scores(self) -> Tensor:
        """Compute the outputs [G,C] that `logit` and `log-odds` compare with the teacher's: of the
        separate output layer if there is one, else of the classifier."""
        separate = self._distiller.scores
        return self.classes if separate is None else self._task_output(separate)

    def _task_output(self, output: nn.Module | None) -> Tensor:
        student, read, task = self._distiller.student, self._read, self._wanted.task
        assert task is not None
        if task.tokens is None:
            return class_logits(student, read.last, read.present, output)
        return tag_logits(student, read.last[task.tokens], output)


def _projection(own: int, width: int, he: bool) -> nn.Linear:
    linear = nn.Linear(own, width)
    if he:  # He et al. 2015; 2.4 times the deviation of PyTorch's start
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
    return linear


def _key(loss: Loss, name: str) -> str:
    return f"{loss.name}_{name}".replace(".", "_")
