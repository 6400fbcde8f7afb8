"""Both sides of every loss for one batch: the student's outputs and the teacher's targets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from teachonce.student_train.data.batch import Distillation, Inputs, StudentBatch, pool_members
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.model.any_student import (
    Outputs,
    class_logits,
    kind_of,
    sentence_states,
    tag_logits,
)
from teachonce.student_train.train.next_predictions import NextTokens

if TYPE_CHECKING:
    from teachonce.student_train.train.distiller import Distiller

# Features that average the layers from this number to the last; layer 0 is the embeddings.
MEANS = {"mean": 1, "mean0": 0}
VECTORS = "vectors"  # key of text vectors in `Sides.states`, and of their modules


class Sides:
    """Computes the inputs of every loss for one batch: the student's side and the teacher's.

    The student runs once over the batch, once more for each alignment with its own input ids, and
    once more for text vectors if the batch is masked.
    terms: the losses that are computed.
    """

    def __init__(self, distiller: Distiller, batch: StudentBatch, terms: Sequence[Term]) -> None:
        if any(aligned.encoded is not None for aligned in batch.aligned.values()):
            raise ValueError("the batch is encoded: call batch.to(device) first")
        self._distiller, self._batch = distiller, batch
        self.terms, self._last = tuple(terms), dict[str, Tensor]()
        maps = any(term.loss.student == "maps" for term in terms)
        without_teacher = any(term.loss.without_teacher for term in terms)
        causal = any(term.loss.of_next for term in terms)
        vectors = batch.vectors is not None
        # This pass is left out if nothing reads it: under `reduce` alone the student reads only its
        # second input.
        if (
            without_teacher
            or causal
            or any(aligned.inputs is None for aligned in batch.aligned.values())
            or (vectors and batch.unmasked is None)
        ):
            native = self._encode(batch.inputs, maps)
        # The order of the computations below decides the last bits of gradients.
        self._next = None
        if causal:
            head, pieces = distiller.logits, distiller.vocabulary
            self._next = NextTokens(head, pieces, native.last, batch, self.terms)
        self._masked = None
        # Logits of the tokens with a label alone: with 120,000 pieces the head costs as much as the
        # encoder.
        if without_teacher and not causal:
            self._masked = distiller.logits(native.last[batch.masked])
        self._aligned = {
            name: _AlignedSides(
                distiller,
                aligned,
                native if aligned.inputs is None else self._encode(aligned.inputs, maps),
            )
            for name, aligned in batch.aligned.items()
        }
        self._vectors: Tensor | None = None
        if vectors and batch.unmasked is not None:
            outputs = self._encode(batch.unmasked)
            self._vectors = distiller.vectors(batch.unmasked, outputs)
        elif vectors:
            self._vectors = distiller.vectors(batch.inputs, native)

    def _encode(self, inputs: Inputs, maps: bool = False) -> Outputs:
        outputs = self._distiller.encode(inputs, maps)
        self._last.setdefault("last layer", outputs.last)
        return outputs

    def of(self, term: Term | str) -> list[tuple[Any, ...]]:
        """Return the arguments of a term's formula, a tuple for each teacher feature that it reads.

        A tuple has the student's side and the teacher's; for maps also a mask of the pairs of runs
        that are present; for a loss with temperature also the temperature; for `next` the student's
        side alone. The list is empty if the batch has no such targets. Raises ValueError for the
        name of a loss without a weight.
        """
        if isinstance(term, str):
            named = {t.name: t for t in self.terms}
            if term not in named:
                raise ValueError(f"no loss {term!r} is trained; expected one of {', '.join(named)}")
            term = named[term]
        if term.loss.student == "masked":
            return [(self._masked, self._batch.labels)]
        if term.loss.of_vectors:
            if self._vectors is None:
                return []
            parts = [self._vectors, *(self._vectors[:, :n] for n in term.widths)]
            return [(part, self._batch.vectors) for part in parts]
        if term.loss.of_next and self._next is not None:
            pairs = self._next.of(term)
        else:
            pairs = self._aligned[term.alignment].of(term)
        return [term.arguments(*pair) for pair in pairs]

    def loss(self, term: Term) -> Tensor | None:
        """Compute a term's loss, the mean over the teacher's features; None if the batch has no
        targets for it."""
        if self._next is not None and term in self._next.losses:
            return self._next.losses[term]
        if not (features := self.of(term)):
            return None
        return reduce(add, (term.function(*arguments) / len(features) for arguments in features))

    def states(self) -> dict[str, Tensor]:
        """Return, by name, the text vectors and the states [G,Ds] that the computed losses compare,
        not projected; without any, the states of the last layer."""
        each = (aligned.compared.items() for aligned in self._aligned.values())
        compared = dict(chain.from_iterable(each))
        if self._vectors is not None:
            compared[VECTORS] = self._vectors
        return compared or self._last

    def task_logits(self) -> Tensor | None:
        """Return the student's logits [G,C] for the task, or None without a task."""
        of_task = self._batch.of_task
        return None if of_task is None else self._aligned[of_task].task_logits(self.terms)


class _AlignedSides:
    """Computes the inputs of the losses of one alignment, for one batch."""

    def __init__(self, distiller: Distiller, aligned: Distillation, outputs: Outputs) -> None:
        self._distiller, self._aligned, self._outputs = distiller, aligned, outputs
        self._pieces: Tensor | None = None
        self.compared = dict[str, Tensor]()  # states of losses, see `Sides.states`

    def of(self, term: Term) -> list[tuple[Any, ...]]:
        """Return the student's side and the teacher's for each feature that a term reads; [] if
        the batch has no such targets."""
        loss = term.loss
        match loss.student:
            case "runs" | "sentence":
                return self._of_states(term)
            case "maps":
                return self._of_maps()
            case "pieces" if self._aligned.logit_runs is not None:
                aligned = self._aligned
                targets = aligned.shared if loss.teacher == "shared" else aligned.logits
                return [(self._logits(term), targets)]
            case "classes" | "scores" if self._aligned.task is not None:
                task = self._aligned.task
                target = task.gold if loss.teacher == "gold" else task.logits
                logits = self.classes if loss.student == "classes" else self.scores
                return [] if target is None else [(logits, target)]
        return []

    def task_logits(self, terms: Sequence[Term]) -> Tensor:
        """Return the logits [G,C] by which the student is scored. They are the classifier's; in a
        stage that trains only the separate output layer, they are this layer's."""
        sides = {term.loss.student for term in terms}
        return self.scores if "scores" in sides and "classes" not in sides else self.classes

    def _of_states(self, term: Term) -> list[tuple[Any, ...]]:
        loss, aligned, distiller, arguments = term.loss, self._aligned, self._distiller, []
        for name, target in aligned.decoded.get(loss.teacher, {}).items():
            if loss.student == "runs":
                states = self._outputs.states[MEANS.get(name, 1) :]
                layers = distiller.counterpart(states, name)
                pooled = aligned.runs.pool(layers, term.pool)
            else:
                outputs = self._outputs
                pooled = sentence_states(distiller.student, outputs.last, outputs.present)
            self.compared[f"{loss.name} {name}"] = pooled
            pooled = kind_of(distiller.student).drop(distiller.student, pooled)
            arguments.append((distiller.projected(loss, name, pooled), target))
        return arguments

    def _of_maps(self) -> list[tuple[Any, ...]]:
        pooling, arguments = self._aligned.map_pooling, []
        for name, target in self._aligned.decoded.get("maps", {}).items():
            assert pooling is not None
            present = pooling.present
            maps = pooling.pool(self._distiller.counterpart(self._outputs.maps, name))
            arguments.append((maps, target, present[:, :, None] & present[:, None, :]))
        return arguments

    def _logits(self, term: Term) -> Tensor:
        """Compute vocabulary logits [G,V] of the runs with logit targets, once: all terms of an
        alignment have the same pooling."""
        runs, distiller, last = self._aligned.logit_runs, self._distiller, self._outputs.last
        assert runs is not None
        if self._pieces is None:
            if term.pools_logits:
                # In float32 before the sum: bfloat16 has 8 bits of precision.
                logits = distiller.logits(last[runs.member]).float()
                self._pieces = pool_members(logits, runs.begin, term.pool)
            else:
                self._pieces = distiller.logits(runs.pool(last, term.pool))
        return self._pieces

    @cached_property
    def classes(self) -> Tensor:
        """Compute the task logits [G,C] of texts or tokens."""
        return self._task_output(None)

    @cached_property
    def scores(self) -> Tensor:
        """Compute the outputs [G,C] that `logit` and `log-odds` compare with the teacher's: those
        of the separate output layer if there is one, else those of the classifier."""
        separate = self._distiller.scores
        return self.classes if separate is None else self._task_output(separate)

    def _task_output(self, output: nn.Module | None) -> Tensor:
        student, outputs, task = self._distiller.student, self._outputs, self._aligned.task
        assert task is not None
        if task.tokens is None:
            return class_logits(student, outputs.last, outputs.present, output)
        return tag_logits(student, outputs.last[task.tokens], output)
