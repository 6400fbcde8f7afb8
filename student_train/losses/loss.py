"""What a loss is: the student's and the teacher's side that it compares, its formula, its value if
there is nothing to compare, and its weight in a student's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from teachonce.support.errors import UserError, first_line, out_of_memory

if TYPE_CHECKING:  # `student-train --help` lists the losses and must not wait for torch
    from torch import Tensor

    from teachonce.store.format.features import OutputKind

P = ParamSpec("P")

Teacher = Literal[
    "nothing",  # the text alone
    "gold",  # gold labels or tags
    "classes",  # logits of the classes of a task
    "distribution",  # probabilities of pieces, from the tier topk, sample or head
    "observed",  # probabilities of the text between shared ends of tokens
    "edges",  # which of the student's tokens begin inside a token of the teacher
    "shared",  # logits of the pieces in both vocabularies, up to a constant
    "logits",  # logits of pieces; the tier `sample` does not have them
    "normalised",  # states of aligned runs, normalised per channel with the store's calibration
    "raw",  # states of aligned runs, not normalised
    "sentence",  # the state of the first token, normalised per channel
    "raw sentence",  # the state of the first token, not normalised
    "maps",  # attention between aligned runs
    "vector",  # the vector of the whole text
]
"""The teacher's side of a loss."""

Student = Literal[
    "masked",  # vocabulary logits of the masked tokens
    "pieces",  # vocabulary logits of aligned runs
    "next",  # log-probabilities of the next tokens, of a decoder
    "predictions",  # `Predictions` before aligned runs, of a decoder
    "chunks",  # log-probabilities of aligned runs, of a decoder
    "classes",  # logits of the classes of a task
    "scores",  # the output for the teacher's logits or log-odds: see --outputs
    "runs",  # pooled states of aligned runs
    "sentence",  # the input of the classifier
    "maps",  # attention between aligned runs
    "vector",  # the vector of the whole text: the mean of its states, projected if sizes differ
]
"""The student's side of a loss."""

FEATURES = ("hidden", "logits", "task", "attention", "embedding")
_FEATURE_OF: dict[Teacher, str] = {
    "gold": "task",
    "classes": "task",
    "distribution": "logits",
    "observed": "logits",
    "shared": "logits",
    "logits": "logits",
    "normalised": "hidden",
    "raw": "hidden",
    "sentence": "hidden",
    "raw sentence": "hidden",
    "maps": "attention",
    "vector": "embedding",
}


def zero_if_empty(formula: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap a formula so that it returns 0, with a gradient, if the student's side has no rows."""

    @wraps(formula)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        rows = rows_of(args[0] if args else kwargs[next(iter(signature(formula).parameters))])
        # Times 0, not a constant: the loop refuses a loss without a gradient.
        return formula(*args, **kwargs) if rows.numel() else rows.sum() * 0.0

    return guarded


def rows_of(student: Any) -> Tensor:
    """Return the student's side of a loss if it is a tensor; of `Predictions`, the field
    `following`, which has the same rows."""
    rows: Tensor = getattr(student, "following", student)
    return rows


@dataclass(frozen=True)
class Parameter:
    """Describes the number X in the name NAME:X of a loss, an argument of its formula.

    letter: the name of X in help texts. argument: its keyword in the formula. low, high: its
        bounds, both exclusive.
    """

    letter: str
    argument: str
    default: float
    low: float
    high: float

    def parse(self, word: str) -> float | None:
        """Return the number, or None if `word` is not a number within the bounds."""
        if "_" in word:  # float("0_5") is 5.0, but `distiller._key` writes 0_5 for 0.5
            return None
        try:
            number = float(word)
        except ValueError:
            return None
        return number if self.low < number < self.high else None


@dataclass(frozen=True)
class Loss:
    """Describes one loss.

    name: the name in `--loss`. A loss of a task and a loss of a vocabulary may share a name.
    formula: a function of your own, or `module.function` of this package. Its arguments are the
        student's side, the teacher's side (except for `next`), for maps also which pairs of runs
        are present, and the temperature if `tempered`. It returns a scalar that is already
        averaged. It is not called if the student's side has no rows: the loss is 0.
    teacher, student: the teacher's and the student's side that it compares.
    unit: the unit of its value, for the model card.
    projection: whether the student's states pass through a linear map to the teacher's hidden
        size: never, always, or only if the sizes differ. A projection of text vectors remains a
        part of the student.
    output_kind: the kind of task outputs that the formula requires; None for any.
    of_draws: whether it can be computed from random draws of the teacher, the tier `sample`.
    of_pairs: whether it compares the texts of a batch with one another, so that it needs two.
    parameter: the number that its name may give, such as 0.3 in `jsd:0.3`.
    value: this number; None for the parameter's default.
    """

    name: str
    formula: str | Callable[..., Tensor]
    teacher: Teacher
    student: Student
    unit: str
    projection: Literal["none", "always", "widths differ"] = "none"
    tempered: bool = False
    output_kind: OutputKind | None = None
    of_draws: bool = True
    of_pairs: bool = False
    parameter: Parameter | None = None
    value: float | None = None

    @property
    def shown(self) -> str:
        """Return the name as help texts show it, with the letter of its parameter: `jsd[:B]`."""
        return self.name if self.parameter is None else f"{self.name}[:{self.parameter.letter}]"

    @property
    def feature(self) -> str | None:
        """Return the feature group of the store that the loss reads, one of `FEATURES`; None if it
        reads none."""
        return _FEATURE_OF.get(self.teacher)

    @property
    def of_next(self) -> bool:
        """Return whether the loss compares predictions of the next token, which only decoders
        make."""
        return self.student in ("next", "predictions", "chunks")

    @property
    def without_teacher(self) -> bool:
        """Return whether the loss needs no teacher: it is a mean over the masked tokens, or over
        the next tokens, of the text."""
        return self.teacher == "nothing"

    @property
    def per_prediction(self) -> bool:
        """Return whether the loss is a mean over all predicted tokens: the masked tokens, or the
        next tokens."""
        return self.teacher in ("nothing", "edges")

    @property
    def of_vectors(self) -> bool:
        """Return whether the loss compares vectors of whole texts, without an alignment."""
        return self.student == "vector"

    @property
    def nests(self) -> bool:
        """Return whether the loss also works on the first numbers of the vectors (Matryoshka)."""
        # Only for cosines between the student's own vectors: the first numbers of the teacher's
        # vectors have no meaning by themselves, so a student's cannot be compared with them.
        return self.of_vectors and self.projection == "none"

    @property
    def of_gold(self) -> bool:
        """Return whether the loss is a mean over gold labels or tags."""
        return self.teacher == "gold"

    @property
    def head(self) -> Literal["vocabulary", "task"] | None:
        """Return the head that a student needs for the loss, or None if any student will do."""
        if self.of_next or self.student in ("masked", "pieces"):
            return "vocabulary"
        return "task" if self.student in ("classes", "scores") else None

    @property
    def function(self) -> Callable[..., Tensor]:
        """Return the formula; imports its module if it is given by name."""
        if callable(self.formula):
            formula = zero_if_empty(self._checked)
        else:
            module, _, function = self.formula.partition(".")
            formula = getattr(import_module(f"{__package__}.{module}"), function)
        if self.parameter is not None:
            value = self.parameter.default if self.value is None else self.value
            return partial(formula, **{self.parameter.argument: value})
        return formula

    def _checked(self, *sides: Any, **arguments: Any) -> Tensor:
        """Compute the formula of another package. Raises UserError if it fails, if its value is not
        a tensor of one number, or if the value has no gradient."""
        import torch

        assert callable(self.formula)
        try:
            value = self.formula(*sides, **arguments)
        except Exception as error:  # a foreign formula may raise any error
            if isinstance(error, UserError) or out_of_memory(error):
                raise
            inside = error.__traceback__ and error.__traceback__.tb_next
            code = f", {inside.tb_frame.f_code.co_filename}:{inside.tb_lineno}" if inside else ""
            raise UserError(
                f"--loss {self.name}: its formula fails ({first_line(error)}{code}); its arguments"
                " are the student's side and the teacher's (docs/losses.md, Your own loss)"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"--loss {self.name}: its formula returns {got}; expected a tensor of one number,"
                " the mean over the batch"
            )
        # In a sum with other losses, a loss without a gradient would silently train nothing. A
        # constant 0 is allowed: a batch may have nothing to compare.
        trained = rows_of(sides[0]).requires_grad
        if trained and torch.is_grad_enabled() and not value.requires_grad and value.item() != 0:
            raise UserError(
                f"--loss {self.name}: its value has no gradient, so it trains nothing; compute it"
                " from the student's side without detach, item, numpy, argmax or no_grad"
            )
        return value.reshape(())

    def variants(self, names: Iterable[str]) -> Iterator[Loss]:
        """Yield this loss for each of the `names` that refer to it, such as `jsd` and `jsd:0.3`."""
        for name in names:
            base, colon, word = name.partition(":")
            if base != self.name or (colon and self.parameter is None):
                continue
            value = self.parameter.parse(word) if colon and self.parameter else None
            if not colon or value is not None:
                yield replace(self, name=name, value=value)


@dataclass(frozen=True)
class Term:
    """Describes one weighted term of a student's loss.

    loss: the entry of the registry.
    weight: the factor of its value.
    alignment: the name of its alignment; "" if it needs none.
    pool: how the outputs of a run are pooled: `sum` or `mean`.
    temperature: the temperature of a tempered loss, else None.
    widths: the lengths of vector prefixes that it compares as well (`--matryoshka`).
    pools_logits: whether to pool logits instead of the hidden states that the head reads.
    """

    loss: Loss
    weight: float
    alignment: str = ""
    pool: str = "mean"
    temperature: float | None = None
    widths: tuple[int, ...] = ()
    pools_logits: bool = False

    @property
    def name(self) -> str:
        return self.loss.name

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """Return the formula, imported once."""
        return self.loss.function

    def arguments(self, *sides: Any) -> tuple[Any, ...]:
        """Return the arguments of the formula: the sides, and a tempered loss's temperature."""
        return sides if self.temperature is None else (*sides, self.temperature)
