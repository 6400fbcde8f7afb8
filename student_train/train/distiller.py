"""The student in training: an ordinary transformers model, and the projections that are discarded
after training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from teachonce.checkpoints.sentence_folder import VectorHead
from teachonce.store import Features, FeatureStore
from teachonce.student_train.data.batch import Inputs, StudentBatch
from teachonce.student_train.data.blocks import output_kind_of
from teachonce.student_train.losses.loss import Loss, Term
from teachonce.student_train.model.any_student import (
    Outputs,
    head_of,
    kind_of,
    own_projection,
    pooled_tokens,
    shared_pass,
    student_size,
)
from teachonce.student_train.plan.train_plan import every_term, terms_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.sides import MEANS, VECTORS, Sides
from teachonce.support.errors import UserError
from teachonce.training.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Computed:
    """Holds what a student computes for a batch: unweighted losses by name, the logits [G,C] of a
    task or None, and the states of `Sides.states` by name."""

    losses: dict[str, Tensor]
    task_logits: Tensor | None
    states: dict[str, Tensor]


class Distiller(nn.Module):
    """Holds a student, and a projection for each loss that needs one and each hidden state of a
    teacher. Training updates its parameters.

    student: a model of transformers, or a module of your own (`OwnStudent`).
    terms: the losses to compute for a batch. Methods accept other terms.
    features: the teacher's features in the store.
    start: how the projections are initialised, `he` or `pytorch`.
    every: terms of all stages, for which projections are made; default: `terms`.
    frozen: whether the projections are not trained: their parameters then require no gradient.
    separate: whether `logit` and `log-odds` have an output layer of their own.
    bf16: whether losses are computed under autocast; without it, autocast yourself as you need.
    ranks: the processes that share the texts of a batch.

    `Distiller.of` takes all of these from options and a store.
    """

    def __init__(
        self,
        student: Any,
        terms: Sequence[Term],
        features: Features,
        *,
        every: Sequence[Term] = (),
        frozen: bool = False,
        start: str = "pytorch",
        separate: bool = False,
        bf16: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.student, self.terms = student, tuple(terms)
        self.bf16, self.ranks = bf16, ranks
        width, self.layers = student_size(student)
        self.projections = nn.ModuleDict()
        self.projected_losses = set[str]()  # by the student's own projection
        self.every = tuple(every) or self.terms
        for loss in (term.loss for term in self.every):
            if loss.of_vectors or loss.projection == "none":
                continue
            if loss.projection == "widths differ" and width == features.width:
                continue
            if own_projection(student) is not None:
                self.projected_losses.add(loss.name)
                continue
            for name in features.hidden:
                linear = nn.Linear(width, features.width)
                if start == "he":  # He et al. 2015; 2.4 times the deviation of PyTorch's start
                    nn.init.kaiming_normal_(linear.weight)
                    nn.init.zeros_(linear.bias)
                self.projections[_key(loss, name)] = linear
        sides = {term.loss.student for term in self.every}
        self.scores: nn.Module | None = None
        if separate and {"classes", "scores"} <= sides:
            # Mukherjee & Awadallah 2019, section 4.1: W^r in addition to W^s.
            classes: Any = student.classifier
            self.scores = nn.Linear(classes.in_features, classes.out_features)
        if of_vectors := [term for term in self.every if term.loss.of_vectors]:
            assert features.embedding is not None  # `plan/checks.py` refuses such a store
            self.projections[VECTORS] = self._vector_head(
                of_vectors, width, features.embedding.width
            )
        # `set_frozen` does the same for each stage of a training; your own loop has only this.
        self.projections.requires_grad_(not frozen)

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
    def _vector_head(terms: list[Term], hidden: int, width: int) -> VectorHead:
        """Make the mean pooling, and a map to the teacher's vector size if a loss needs it."""
        # Imported here: it takes seconds, and only students of text vectors need it.
        from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

        projected = hidden != width and any(term.loss.projection != "none" for term in terms)
        size = width if projected else hidden
        if too_wide := [n for term in terms for n in term.widths if n >= size]:
            raise UserError(
                f"--matryoshka {too_wide[0]}: the student's vectors have size {size}; give smaller"
                " sizes"
            )
        # Without a bias: the student can add any constant to its states itself.
        dense = [Dense(hidden, width, bias=False, activation_function=None)] if projected else []
        return VectorHead(Pooling(hidden, "mean"), *dense, Normalize())

    @classmethod
    def of(
        cls,
        student: Any,
        options: TrainOptions,
        store: FeatureStore,
        *,
        bf16: bool = False,
        ranks: Ranks = ALONE,
    ) -> Distiller:
        """Make the distiller of a student from options and a store.

        Raises UserError for a model that cannot be a student.
        """
        output_kind = None if head_of(student) in ("mlm", "causal") else output_kind_of(store)
        return cls(
            student,
            terms_of(options, output_kind),
            store.features,
            every=every_term(options, output_kind),
            frozen=options.projection == "frozen",
            start=options.projection_start,
            separate=options.outputs == "separate",
            bf16=bf16,
            ranks=ranks,
        )

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Compute unweighted losses by name, each a scalar with its own normaliser.

        A loss is missing if the batch has no targets for it.
        """
        return self.compute(batch).losses

    def compute(self, batch: StudentBatch, terms: Sequence[Term] | None = None) -> Computed:
        """Run the student, and compute the losses of `terms`, by default the distiller's own."""
        device, losses = batch.inputs.ids.device.type, dict[str, Tensor]()
        with torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext():
            sides = self.sides(batch, terms)
            for term in sides.terms:
                if (loss := sides.loss(term)) is not None:
                    losses[term.name] = loss
            return Computed(losses, sides.task_logits(), sides.states())

    def sides(self, batch: StudentBatch, terms: Sequence[Term] | None = None) -> Sides:
        """Run the student over a batch, and return the inputs of the losses of `terms`."""
        return Sides(self, batch, self.terms if terms is None else terms)

    def weighted(self, losses: Mapping[str, Tensor], terms: Sequence[Term] | None = None) -> Tensor:
        """Return the sum of losses, given by name, with the weights of their terms: a scalar."""
        weights = {term.name: term.weight for term in (self.terms if terms is None else terms)}
        return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()

    def vectors(self, inputs: Inputs, read: Outputs) -> Tensor:
        """Compute the student's vectors [B,D] of texts from its outputs."""
        head = self.vector_head
        assert head is not None
        # The modules of sentence-transformers take padded batches.
        states = read.last.new_zeros(*read.present.shape, read.last.shape[1])
        states[read.present] = read.last
        present = pooled_tokens(self.student, inputs.ids, inputs.present)
        vectors: Tensor = head(states, present)
        return vectors

    def projected(self, loss: Loss, name: str, states: Tensor) -> Tensor:
        """Project student states [G,Ds] to the teacher's hidden size [G,D] for the feature `name`.
        Return them unchanged if the loss needs no projection."""
        projection = own_projection(self.student)
        if projection is not None and loss.name in self.projected_losses:
            projected: Tensor = projection(states)
            return projected
        key = _key(loss, name)
        return self.projections[key](states) if key in self.projections else states

    def logits(self, states: Tensor) -> Tensor:
        """Return LM-head logits [M,V] of flat states [M,D]."""
        return kind_of(self.student).lm(self.student, states)

    def encode(self, inputs: Inputs, maps: bool = False) -> Outputs:
        """Run the student forward, as `shared_pass` does."""
        return shared_pass(self.student, inputs, maps, self.ranks)

    def counterpart(self, values: list[Tensor], name: str) -> Tensor:
        """Return what the student compares with the teacher feature `name`, in the shape of
        `values`.

        values: the states [N,Ds] or attention maps [B,S,S] of the student's layers; for `mean0`,
        the embeddings come first. Returns their mean over all layers (`MEANS`) or over group i of N
        (`groupsN.i`); for any other name, the last layer. Raises UserError if N does not divide the
        number of layers.
        """
        if name in MEANS:
            return torch.stack(values).mean(dim=0)
        group = re.fullmatch(r"groups(\d+)\.(\d+)", name)
        if group is None:
            return values[-1]
        count, i = int(group[1]), int(group[2])
        if len(values) % count:
            raise UserError(
                f"{name}: the student's {len(values)} layers cannot be divided into {count} groups;"
                " give it another number of layers"
            )
        size = len(values) // count
        return torch.stack(values[i * size : (i + 1) * size]).mean(dim=0)


def _key(loss: Loss, name: str) -> str:
    # A ModuleDict refuses names with a dot.
    return f"{loss.name}_{name}".replace(".", "_")
