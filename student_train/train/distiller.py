"""The student in training: an ordinary transformers model, the projections that exist only while it
is trained, and both sides of each loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from teachonce.checkpoints.sentence_folder import VectorHead
from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import Distillation, Inputs, StudentBatch
from teachonce.student_train.losses.registry import Loss, losses_for
from teachonce.student_train.model.any_student import (
    class_logits,
    head_of,
    lm_logits,
    own_projection,
    pooled_tokens,
    sentence_states,
    size_of,
    tag_logits,
)
from teachonce.student_train.settings.alignments import ALIGNMENTS, Strategy
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.forward_pass import Outputs, forward_pass
from teachonce.support.errors import UserError

VECTORS = "vectors"  # key of the steps to vectors of texts, among the projections
MEANS = {"mean": 1, "mean0": 0}  # features that average all layers, and the first of these


class Distiller(nn.Module):
    """Holds a student, and a projection for each loss that needs one and each hidden state of a
    teacher. Its parameters are what a training moves.

    `student` is a model of transformers, or a module of your own (`OwnStudent`). `hidden` are the
    names of the teacher's states in the store, `width` is that of each, `vector_width` that of its
    vectors of texts. `of` takes these from a store.
    """

    def __init__(
        self,
        student: Any,
        options: TrainOptions,
        hidden: tuple[str, ...],
        width: int,
        vector_width: int | None = None,
    ) -> None:
        super().__init__()
        self.student, self.options = student, options
        own, self.layers = size_of(student)
        self.for_task: bool = head_of(student) != "mlm"
        self.projections = nn.ModuleDict()
        self.projected_losses = set[str]()  # by the student's own projection
        learnt = losses_for(self.for_task, options.losses())
        for loss in learnt:
            if loss.of_text or loss.projection == "none":
                continue
            if loss.projection == "widths differ" and own == width:
                continue
            if own_projection(student) is not None:
                self.projected_losses.add(loss.name)
                continue
            for name in hidden:
                self.projections[_key(loss, name)] = self._projection(own, width)
        self.scores = self._separate_scores()
        if of_text := [loss for loss in learnt if loss.of_text]:
            assert vector_width is not None  # `check` has refused
            self.projections[VECTORS] = self._vector_head(
                of_text, own, vector_width, options.matryoshka
            )

    @property
    def vector_head(self) -> VectorHead | None:
        """The steps from the student's last states to its vector of a text: a part of the finished
        student. None where no loss reads vectors."""
        if VECTORS not in self.projections:
            return None
        head = self.projections[VECTORS]
        assert isinstance(head, VectorHead)
        return head

    def share_vector_head(self, other: Distiller) -> None:
        """Make vectors by the steps of another distiller of the same student."""
        if VECTORS in self.projections and VECTORS in other.projections:
            self.projections[VECTORS] = other.projections[VECTORS]

    @staticmethod
    def _vector_head(
        losses: list[Loss], own: int, width: int, nested: tuple[int, ...]
    ) -> VectorHead:
        """Make the mean of states, and a map to the teacher's space where a loss compares with it.

        The map has no bias: the mean of states can hold one.
        """
        from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

        projected = own != width and any(loss.projection != "none" for loss in losses)
        dense = [Dense(own, width, bias=False, activation_function=None)] if projected else []
        if too_wide := [n for n in nested if n >= (width if projected else own)]:
            raise UserError(
                f"--matryoshka {too_wide[0]}: the student's vectors are"
                f" {width if projected else own} wide; give smaller widths"
            )
        return VectorHead(Pooling(own, "mean"), *dense, Normalize())

    def _separate_scores(self) -> nn.Module | None:
        """Make an output for the teacher's logits or log odds, of the form of the classes' output,
        where the classes' has losses of its own to learn by (Mukherjee & Awadallah 2019, section
        4.1: W^r beside W^s)."""
        read = {loss.student for loss in losses_for(self.for_task, self.options.losses())}
        if self.options.outputs == "shared" or not {"classes", "scores"} <= read:
            return None
        classifier: Any = self.student.classifier
        return nn.Linear(classifier.in_features, classifier.out_features)

    def _projection(self, own: int, width: int) -> nn.Linear:
        linear = nn.Linear(own, width)
        if self.options.projection == "frozen":
            nn.init.kaiming_normal_(linear.weight)  # He et al. 2015, as in the published code
            nn.init.zeros_(linear.bias)
        return linear

    @classmethod
    def of(cls, student: Any, options: TrainOptions, store: FeatureStore) -> Distiller:
        """Make the distiller of a student that learns from a store.

        Raises UserError for a model that can be no student.
        """
        features = store.features
        vector_width = features.embedding.width if features.embedding else None
        return cls(student, options, features.hidden, features.width, vector_width)

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Compute unweighted losses by name, each a scalar with its own normaliser.

        A loss is absent where the batch holds nothing to compare the student with.
        """
        return self.measured(batch)[0]

    def measured(self, batch: StudentBatch) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute the losses as `forward` does, and the logits [G,C] of a task; None without
        one."""
        sides, found = self.sides(batch), dict[str, Tensor]()
        for loss in sides.losses:
            if pairs := sides.of(loss):  # the mean over the teacher's features
                found[loss.name] = reduce(add, (loss.measure(*p) / len(pairs) for p in pairs))
        return found, sides.answers()

    def sides(self, batch: StudentBatch) -> Sides:
        """Run the student over a batch, and return what its losses compare."""
        return Sides(self, batch)

    def weighted(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Sum losses by name with the weights of the options: a scalar."""
        weights = self.options.loss
        return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()

    def vectors(self, batch: StudentBatch, read: Outputs) -> Tensor:
        """Compute the student's vectors [B,D] of the texts."""
        head = self.vector_head
        assert head is not None
        states = read.last.new_zeros(*read.present.shape, read.last.shape[1])
        states[read.present] = read.last
        present = pooled_tokens(self.student, batch.inputs.ids, batch.inputs.present)
        vectors: Tensor = head(states, present)
        return vectors

    def projected(self, loss: Loss, name: str, states: Tensor) -> Tensor:
        """Project student states [G,Ds] to the teacher's width [G,D] for the feature `name`; return
        them as they are where the loss needs no projection."""
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
        """Return the student's counterpart of a teacher feature, of values by layer from 1: the
        mean of all layers, of group i of N, or the last layer. Raises UserError for layers that do
        not fall into N groups."""
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
    """The student's and the teacher's side of each loss, for one batch.

    The student runs over the batch once, and once more for an alignment that has an input of its
    own. `losses` are the entries of the registry that the options weigh.
    """

    def __init__(self, distiller: Distiller, batch: StudentBatch) -> None:
        if any(wanted.encoded is not None for wanted in batch.aligned.values()):
            raise ValueError("the batch is encoded: call batch.to(device) first")
        self._distiller, self._batch = distiller, batch
        self.losses = losses_for(distiller.for_task, distiller.options.loss)
        maps = any(loss.student == "maps" for loss in self.losses)
        own = any(loss.of_masked for loss in self.losses)
        seconds = [wanted.inputs for wanted in batch.aligned.values()]
        if own or not seconds or None in seconds or batch.vectors is not None:
            native = distiller.encode(batch.inputs, maps)
        # The order of these decides the last bits of gradients.
        self._masked = distiller.logits(native.last[batch.masked]) if own else None
        self._aligned = {
            name: _Aligned(
                distiller,
                wanted,
                native if wanted.inputs is None else distiller.encode(wanted.inputs, maps),
                name,
            )
            for name, wanted in batch.aligned.items()
        }
        self._vectors = distiller.vectors(batch, native) if batch.vectors is not None else None

    def of(self, loss: Loss | str) -> list[tuple[Any, ...]]:
        """Return the arguments of a loss's formula, once for each feature of the teacher that it
        reads; nothing where the batch has no such targets.

        They are the student's side and the teacher's, of maps which pairs of runs are present, and
        of a tempered loss the temperature. Raises ValueError for a name that no weight is given
        to.
        """
        if isinstance(loss, str):
            named = {each.name: each for each in self.losses}
            if loss not in named:
                raise ValueError(f"no loss {loss!r} is learnt, of {', '.join(named)}")
            loss = named[loss]
        batch, options = self._batch, self._distiller.options
        if loss.of_masked:
            return [(self._masked, batch.labels)]
        if loss.of_text:
            if self._vectors is None:
                return []
            nested = options.matryoshka if loss.nests else ()
            parts = [self._vectors, *(self._vectors[:, :n] for n in nested)]
            return [(part, batch.vectors) for part in parts]
        pairs = self._aligned[options.alignment_of(loss.name)].of(loss)
        return [(*pair, options.temperature) for pair in pairs] if loss.tempered else pairs

    def answers(self) -> Tensor | None:
        """Return the logits [G,C] that the student answers a task by; None without one."""
        of_task = self._batch.of_task
        return None if of_task is None else self._aligned[of_task].answers(self.losses)


class _Aligned:
    """Finds both sides of each loss of an alignment, for one batch."""

    def __init__(
        self, distiller: Distiller, wanted: Distillation, read: Outputs, alignment: str
    ) -> None:
        self._distiller, self._wanted, self._read = distiller, wanted, read
        self._strategy: Strategy = ALIGNMENTS[alignment]
        self._pool = distiller.options.pool_of(alignment)

    def of(self, loss: Loss) -> list[tuple[Any, ...]]:
        """Return what the formula of a loss compares, once for each of the teacher's features;
        nothing where the batch has no such targets."""
        match loss.student:
            case "runs" | "sentence":
                return self._of_states(loss)
            case "maps":
                return self._of_maps()
            case "pieces" if self._wanted.logit_runs is not None:
                shared = loss.teacher == "shared"
                return [(self._pieces, self._wanted.shared if shared else self._wanted.logits)]
            case "classes" | "scores" if self._wanted.task is not None:
                task = self._wanted.task
                target = task.gold if loss.teacher == "gold" else task.logits
                own = self.classes if loss.student == "classes" else self.scores
                return [] if target is None else [(own, target)]
        return []

    def answers(self, losses: list[Loss]) -> Tensor:
        """Return the logits [G,C] that the student answers by: those of the classes, but in a stage
        that teaches only an output beside them, that output's."""
        read = {loss.student for loss in losses}
        return self.scores if "scores" in read and "classes" not in read else self.classes

    def _of_states(self, loss: Loss) -> list[tuple[Any, ...]]:
        wanted, distiller, found = self._wanted, self._distiller, []
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
                own = wanted.runs.pool(layers, self._pool)
            else:
                own = sentence_states(distiller.student, self._read.last, self._read.present)
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

    @cached_property
    def _pieces(self) -> Tensor:
        """Compute vocabulary logits [G,V] of the runs that have logit targets."""
        runs, distiller, last = self._wanted.logit_runs, self._distiller, self._read.last
        assert runs is not None
        if self._strategy.pools_logits:
            return runs.pool_members(distiller.logits(last[runs.member]).float(), self._pool)
        return distiller.logits(runs.pool(last, self._pool))

    @cached_property
    def classes(self) -> Tensor:
        """Compute logits [G,C] of a task, of texts or of tokens."""
        return self._task_output(None)

    @cached_property
    def scores(self) -> Tensor:
        """Compute what is compared with the teacher's logits or log odds [G,C]: the output of its
        own, or the classes'."""
        separate = self._distiller.scores
        return self.classes if separate is None else self._task_output(separate)

    def _task_output(self, output: nn.Module | None) -> Tensor:
        student, read, task = self._distiller.student, self._read, self._wanted.task
        assert task is not None
        if task.tokens is None:
            return class_logits(student, read.last, read.present, output)
        return tag_logits(student, read.last[task.tokens], output)


def _key(loss: Loss, name: str) -> str:
    return f"{loss.name}_{name.replace('.', '_')}"
