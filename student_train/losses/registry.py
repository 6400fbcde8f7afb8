"""The registry of losses. An entry holds everything that other code needs to know about a loss.

Losses are computed, and their projections initialised, in the order of the entries. The order
affects the last bits of a student: insert a new entry next to similar ones, and never reorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.support.plugins import load_outside

if TYPE_CHECKING:  # `student-train --help` lists the losses and must not wait for torch
    from torch import Tensor

    from teachonce.store.format.features import OutputKind

Teacher = Literal[
    "nothing",  # the text alone
    "gold",  # gold labels or tags
    "classes",  # logits of the classes of a task
    "distribution",  # probabilities of pieces, from the tier topk, sample or head
    "observed",  # probabilities of the text between shared ends of tokens
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


@dataclass(frozen=True)
class Parameter:
    """Describes the number X in the name NAME:X of a loss, an argument of its formula.

    letter: its name in help texts. low, high: its bounds, both exclusive.
    """

    letter: str
    argument: str
    default: float
    low: float
    high: float

    def parse(self, word: str) -> float | None:
        """Return the number, or None if `word` is not a number within the bounds."""
        if "_" in word:  # 5.0 for float(), but `distiller._key` writes 0_5 for 0.5
            return None
        try:
            found = float(word)
        except ValueError:
            return None
        return found if self.low < found < self.high else None


@dataclass(frozen=True)
class Loss:
    """Describes one loss.

    name: the name in `--loss`. A loss of a task and a loss of a vocabulary may share a name.
    formula: a function of your own, or `module.function` of this package. Its arguments are the
        student's side, the teacher's side (except for `next`), for maps also which pairs of runs
        are present, and the temperature if `tempered`. It returns a scalar that is already
        averaged.
    teacher, student: the teacher's and the student's side that it compares.
    unit: the unit of its value, for the model card.
    projection: whether the student's states pass through a linear map to the teacher's hidden
        size: never, always, or only if the sizes differ. A projection of text vectors remains a
        part of the student.
    output_kind: the kind of task outputs that the formula requires; None for any.
    of_draws: whether it can be computed from random draws of the teacher, the tier `sample`.
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
    parameter: Parameter | None = None
    value: float | None = None

    @property
    def shown(self) -> str:
        """Return the name as help texts show it, with the letter of its parameter: `jsd[:B]`."""
        return self.name if self.parameter is None else f"{self.name}[:{self.parameter.letter}]"

    @property
    def feature(self) -> str | None:
        """Return the feature group of the store that the loss reads, one of `FEATURES`, or None."""
        return _FEATURE_OF.get(self.teacher)

    @property
    def of_next(self) -> bool:
        """Return whether the loss compares predictions of the next token, which only decoders
        make."""
        return self.student in ("next", "predictions", "chunks")

    @property
    def of_text_alone(self) -> bool:
        """Return whether the loss is a mean over tokens of the text, masked or next, without the
        teacher."""
        return self.teacher == "nothing"

    @property
    def of_text(self) -> bool:
        """Return whether the loss compares vectors of whole texts, without an alignment."""
        return self.student == "vector"

    @property
    def nests(self) -> bool:
        """Return whether the loss also works on the first numbers of the vectors (Matryoshka)."""
        # Only for cosines between the student's own vectors: the first numbers of the teacher's
        # vectors have no meaning by themselves, so a student's cannot be compared with them.
        return self.of_text and self.projection == "none"

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
    def measure(self) -> Callable[..., Tensor]:
        """Return the formula; imports its module if it is given by name."""
        if callable(self.formula):
            found = self._checked
        else:
            module, _, function = self.formula.partition(".")
            found = getattr(import_module(f"{__package__}.{module}"), function)
        if self.parameter is not None:
            value = self.parameter.default if self.value is None else self.value
            return partial(found, **{self.parameter.argument: value})
        return found

    def _checked(self, *sides: Any, **more: Any) -> Tensor:
        """Compute the formula of another package. Raises UserError if it fails, or if its value is
        not a tensor of one number."""
        import torch

        assert callable(self.formula)
        try:
            value = self.formula(*sides, **more)
        except Exception as error:  # a foreign formula may raise any
            if isinstance(error, UserError) or out_of_memory(error):
                raise
            inside = error.__traceback__ and error.__traceback__.tb_next
            code = f", {inside.tb_frame.f_code.co_filename}:{inside.tb_lineno}" if inside else ""
            raise UserError(
                f"--loss {self.name}: its formula fails ({first_line(error)}{code}); its arguments"
                " are the student's side and the teacher's (docs/losses.md, Your own loss)"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"--loss {self.name}: its formula returns {found}; expected a tensor of one number,"
                " the mean over the batch"
            )
        return value.reshape(())

    def variants(self, names: Iterable[str]) -> Iterator[Loss]:
        """Yield this loss for each of the `names` that mean it, such as `jsd` and `jsd:0.3`."""
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
    pools_logits: pool logits, instead of the hidden states under them.
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
        """Return the name that `--loss` gives."""
        return self.loss.name

    @cached_property
    def measure(self) -> Callable[..., Tensor]:
        """Return the formula, imported once."""
        return self.loss.measure

    def value(self, *sides: Any) -> Tensor:
        """Compute the loss from the student's side and the teacher's."""
        more = () if self.temperature is None else (self.temperature,)
        return self.measure(*sides, *more)


HALVES = "half squared distances"
DEVIATIONS = "squared standard deviations of a channel"
A_LABEL = "nats a label"
ODDS = "squared log-odds"
ONE: OutputKind = "one label"
SEVERAL: OutputKind = "several labels"

LOSSES = (
    Loss("mlm", "logits.mlm", "nothing", "masked", "nats a masked token"),
    Loss("next", "next_token.next_token", "nothing", "next", "nats a token"),
    Loss("hidden", "states.hidden", "normalised", "runs", DEVIATIONS, "always"),
    Loss(
        "hidden-sum",
        "states.hidden_sum",
        "normalised",
        "runs",
        "squared standard deviations",
        "always",
    ),
    Loss(
        "hidden-raw", "states.hidden", "raw", "runs", "squared differences of a channel", "always"
    ),
    Loss("hidden-raw-sum", "states.hidden_sum", "raw", "runs", "squared differences", "always"),
    Loss("hidden-gelu", "states.hidden_gelu", "normalised", "runs", DEVIATIONS, "always"),
    Loss("hidden-kld", "states.hidden_kld", "normalised", "runs", "nats", "always"),
    Loss("cosine", "states.cosine", "raw", "runs", "cosine distances", "widths differ"),
    Loss("contrastive", "states.contrastive", "raw", "runs", "nats", "always"),
    Loss("sentence", "states.hidden", "sentence", "sentence", DEVIATIONS, "always"),
    Loss("sentence-gelu", "states.hidden_gelu", "sentence", "sentence", DEVIATIONS, "always"),
    Loss("sentence-gelu-half", "states.half_gelu", "raw sentence", "sentence", HALVES, "always"),
    Loss("sentence-kld", "states.hidden_kld", "sentence", "sentence", "nats", "always"),
    Loss("embedding", "states.cosine", "vector", "vector", "cosine distances", "widths differ"),
    Loss("in-batch", "states.contrastive", "vector", "vector", "nats", "widths differ"),
    Loss("similarity", "vectors.similarity", "vector", "vector", "squared differences of cosines"),
    Loss("similarity-kl", "vectors.similarity_kl", "vector", "vector", "nats"),
    Loss("attention", "maps.attention", "maps", "maps", "squared probabilities"),
    Loss("kl", "logits.kl", "distribution", "pieces", "nats", tempered=True),
    Loss("kl-shared", "logits.kl_shared", "shared", "pieces", "nats", tempered=True),
    Loss("logit", "logits.logit", "logits", "pieces", "squared logits"),
    Loss("hard", "logits.hard", "distribution", "pieces", "nats"),
    Loss("kl-next", "next_token.kl", "distribution", "predictions", "nats", tempered=True),
    Loss(
        "reverse-kl",
        "next_token.reverse_kl",
        "distribution",
        "predictions",
        "nats",
        tempered=True,
        # Draws give most pieces that a student predicts a probability of zero.
        of_draws=False,
    ),
    Loss(
        "jsd",
        "next_token.jsd",
        "distribution",
        "predictions",
        "nats",
        tempered=True,
        of_draws=False,
        # At 0 and 1 the formula would need the logarithm of 0.
        parameter=Parameter("B", "beta", 0.5, 0.0, 1.0),
    ),
    Loss(
        "alm",
        "next_token.alm",
        "observed",
        "chunks",
        "nats a run",
        parameter=Parameter("T", "flatness", 100.0, 0.0, math.inf),
    ),
    Loss("ce", "task.ce", "gold", "classes", "nats a gold label", output_kind=ONE),
    Loss("kl", "task.kl", "classes", "classes", "nats", tempered=True, output_kind=ONE),
    Loss("kl", "task.kl_labels", "classes", "classes", A_LABEL, tempered=True, output_kind=SEVERAL),
    Loss("logit", "task.logit", "classes", "scores", "squared logits"),
    Loss("hard", "task.hard", "classes", "classes", "nats", output_kind=ONE),
    Loss("hard", "task.hard_labels", "classes", "classes", A_LABEL, output_kind=SEVERAL),
    Loss("log-odds", "task.log_odds", "classes", "scores", ODDS, output_kind=ONE),
    Loss("log-odds", "task.log_odds_labels", "classes", "scores", ODDS, output_kind=SEVERAL),
    Loss("margin", "task.margin", "classes", "scores", "squared differences of two logits"),
    Loss("log-odds-half", "task.half_log_odds", "classes", "scores", HALVES, output_kind=ONE),
    Loss(
        "log-odds-half",
        "task.half_log_odds_labels",
        "classes",
        "scores",
        HALVES,
        output_kind=SEVERAL,
    ),
)


GROUP = "teachonce.losses"  # the entry points by which other packages add losses
_OUTSIDE: dict[str, Loss] = {}
"""Losses of other packages that `find` has loaded, by name."""


def find(name: str) -> list[Loss]:
    """Find the losses with this name, or return [].

    A name is the name of a built-in loss, with a number if the loss has a parameter (`jsd:0.3`);
    the name of an entry point in `teachonce.losses`; or `module:attribute`, where a `Loss` is
    defined. Raises UserError for a wrong number, for code that cannot be imported, and for an
    object that is not a `Loss`.
    """
    if found := named([name]):
        return found
    base, colon, _ = name.partition(":")
    known = next((loss.parameter for loss in named([base]) if loss.parameter), None)
    if colon and known:
        within = f"above {known.low:g}"
        if known.high < math.inf:
            within = f"between {known.low:g} and {known.high:g}"
        raise UserError(
            f"--loss {name}: expected {base}:{known.letter} with a number {within}, such as"
            f" {base}:{known.default:g}"
        )
    loss = load_outside(name, GROUP, "--loss")
    if loss is None:
        return []
    if not isinstance(loss, Loss):
        raise UserError(
            f"--loss {name}: expected a Loss ({Loss.__module__}.Loss), got {type(loss).__name__}"
        )
    _check_sides(name, loss)
    # By the name that was given: `--loss`, weights and terms refer to it.
    _OUTSIDE[name] = replace(loss, name=name)
    return [_OUTSIDE[name]]


def _check_sides(name: str, loss: Loss) -> None:
    """Raise UserError if students and stores do not have the two sides of a loss together."""
    able: dict[str, dict[str, None]] = {"gold": {"classes": None, "scores": None}}
    for each in LOSSES:
        able.setdefault(each.teacher, {})[each.student] = None
    if loss.teacher not in able:
        expected = f"teacher={loss.teacher!r}: expected one of {', '.join(able)}"
    elif loss.student not in able[loss.teacher]:
        expected = (
            f"student={loss.student!r}: with teacher={loss.teacher!r} expected one of"
            f" {', '.join(able[loss.teacher])}"
        )
    elif loss.projection not in ("none", "always", "widths differ"):
        expected = f"projection={loss.projection!r}: expected none, always or widths differ"
    else:
        return
    raise UserError(f"--loss {name}: {expected} (docs/losses.md, Your own loss)")


def loss_names() -> list[str]:
    """List the built-in names of `--loss`, each once."""
    return list(dict.fromkeys(loss.name for loss in LOSSES))


def named(names: Iterable[str]) -> list[Loss]:
    """List the losses with these names, in the order of the registry.

    Losses of other packages come last, if `find` has loaded them. No code is imported.
    """
    # Sorted, because the order of a set differs between processes. Variants such as `jsd:0.3` and
    # `jsd:0.5` share an entry.
    wanted = sorted(set(names))
    outside = [_OUTSIDE[name] for name in sorted(_OUTSIDE) if name in wanted]
    return [each for loss in LOSSES for each in loss.variants(wanted)] + outside


def losses_for(output_kind: OutputKind | None, names: Iterable[str] | None = None) -> list[Loss]:
    """List the losses that a student can be trained with, in the order of the registry.

    output_kind: the kind of its task outputs; None for a student with an MLM head.
    names: the names to choose from, by default all.
    """
    other = "vocabulary" if output_kind else "task"
    names = [*loss_names(), *_OUTSIDE] if names is None else names
    able = [loss for loss in named(names) if loss.head != other]
    return [loss for loss in able if loss.output_kind in (None, output_kind)]


def reads_masked_tokens(losses: Collection[Loss]) -> bool:
    """Return whether an encoder without a task reads masked tokens in training with these losses.
    Losses of whole texts read unmasked text, unless another loss needs masked tokens."""
    return any(loss.student == "masked" for loss in losses) or not any(
        loss.of_text for loss in losses
    )


def features_of(losses: Iterable[Loss]) -> list[str]:
    """List the feature groups that losses read, in the order of `FEATURES`."""
    found = {loss.feature for loss in losses}
    return [feature for feature in FEATURES if feature in found]


def help_text() -> str:
    """List the names for `--help`, by the head that a student needs."""
    of_any, of_pieces, of_next, of_task = (
        ", ".join(dict.fromkeys(each.shown for each in LOSSES if (each.head, each.of_next) == kind))
        for kind in ((None, False), ("vocabulary", False), ("vocabulary", True), ("task", False))
    )
    return f"{of_any}; with an MLM head {of_pieces}; for a decoder {of_next}; for a task {of_task}"
