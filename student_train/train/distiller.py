"""The student in training: an ordinary transformers model, the projections that exist only while it
is trained, and both sides of each loss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from student_train.data.batch import Distillation, Inputs, StudentBatch
from student_train.losses.registry import Loss, losses_for
from student_train.model.kinds import (
    class_logits,
    head_of,
    lm_logits,
    own_projection,
    pooled_tokens,
    reads_types,
    sentence_states,
    tag_logits,
)
from student_train.settings.alignments import ALIGNMENTS, Strategy
from student_train.settings.options import TrainOptions
from support.errors import UserError
from training.sentence_modules import Dense, Normalize, Pooling, VectorHead

VECTORS = "vectors"  # key of the steps to vectors of texts, among the projections
MEANS = {"mean": 1, "mean0": 0}  # features that average all layers, and the first of these


@dataclass(frozen=True)
class Outputs:
    """Holds what one forward pass gives: flat states [N,D] by layer (0 is the embeddings) and
    attention maps [B,S,S] by layer, averaged over heads."""

    states: list[Tensor]
    maps: list[Tensor]
    present: Tensor  # bool [B,S]

    @property
    def last(self) -> Tensor:
        """Return states [N,D] of the last layer."""
        return self.states[-1]


class Distiller(nn.Module):
    """Holds a student, and a projection for each loss that needs one and each hidden state of a
    teacher.

    `hidden` are the names of the teacher's states in the store, `width` is that of each,
    `vector_width` that of its vectors of texts.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        options: TrainOptions,
        hidden: tuple[str, ...],
        width: int,
        vector_width: int | None = None,
    ) -> None:
        super().__init__()
        self.student, self.options = student, options
        self.layers = student.config.num_hidden_layers
        self.for_task: bool = head_of(student) != "mlm"
        self.projections = nn.ModuleDict()
        own = student.config.hidden_size
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
        projected = own != width and any(loss.projection != "none" for loss in losses)
        dense = [Dense(own, width, bias=False)] if projected else []
        if too_wide := [n for n in nested if n >= (width if projected else own)]:
            raise UserError(
                f"--matryoshka {too_wide[0]}: the student's vectors are"
                f" {width if projected else own} wide; give smaller widths"
            )
        return VectorHead(Pooling(own, ("mean",)), *dense, Normalize())

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

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Compute unweighted losses by name, each a scalar with its own normaliser.

        A loss is absent where the batch holds nothing to compare the student with.
        """
        return self.measured(batch)[0]

    def measured(self, batch: StudentBatch) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute the losses as `forward` does, and the logits [G,C] of a task; None without
        one."""
        # `StudentBatch.to` has decoded them
        assert all(wanted.encoded is None for wanted in batch.aligned.values())
        losses = losses_for(self.for_task, self.options.loss)
        maps = any(loss.student == "maps" for loss in losses)
        own = [loss for loss in losses if loss.student == "masked"]
        found = dict[str, Tensor]()
        seconds = [wanted.inputs for wanted in batch.aligned.values()]
        if own or not seconds or None in seconds or batch.vectors is not None:
            native = self.encode(batch.inputs, maps)
        for loss in own:
            found[loss.name] = loss.measure(self.logits(native.last[batch.masked]), batch.labels)
        sides = {
            name: _Sides(
                self,
                wanted,
                native if wanted.inputs is None else self.encode(wanted.inputs, maps),
                name,
            )
            for name, wanted in batch.aligned.items()
        }
        vectors = self._vectors(batch, native) if batch.vectors is not None else None
        for loss in losses:
            if loss.of_text and vectors is not None:
                parts = [vectors, *(vectors[:, :n] for n in self.options.matryoshka if loss.nests)]
                found[loss.name] = reduce(
                    add, (loss.measure(part, batch.vectors) / len(parts) for part in parts)
                )
            if loss.teacher == "nothing" or loss.of_text:
                continue
            pairs = sides[self.options.alignment_of(loss.name)].of(loss)
            if loss.tempered:
                pairs = [(*pair, self.options.temperature) for pair in pairs]
            if pairs:  # the mean over the teacher's features
                found[loss.name] = reduce(add, (loss.measure(*p) / len(pairs) for p in pairs))
        return found, None if batch.of_task is None else sides[batch.of_task].answers(losses)

    def _vectors(self, batch: StudentBatch, read: Outputs) -> Tensor:
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
        """Run the student forward once; give attention maps only where asked for."""
        types = inputs.types if reads_types(self.student) else None
        output = self.student.base_model(
            input_ids=inputs.ids,
            attention_mask=inputs.present.long(),
            output_hidden_states=True,
            output_attentions=maps,
            **({} if types is None else {"token_type_ids": types}),
        )
        states = [state[inputs.present] for state in output.hidden_states]
        averaged = [m.mean(dim=1) for m in output.attentions] if maps else []
        return Outputs(states, averaged, inputs.present)

    def counterpart(self, values: list[Tensor], name: str) -> Tensor:
        """Return the student's counterpart of a teacher feature, of values by layer from 1: the
        mean of all layers, of group i of N, or the last layer."""
        if name in MEANS:
            return torch.stack(values).mean(dim=0)
        group = re.fullmatch(r"groups(\d+)\.(\d+)", name)
        if group is None:
            return values[-1]
        count, i = int(group[1]), int(group[2])
        size = self.layers // count
        return torch.stack(values[i * size : (i + 1) * size]).mean(dim=0)


class _Sides:
    """Finds the student's and the teacher's side of each loss of an alignment, for one batch."""

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
