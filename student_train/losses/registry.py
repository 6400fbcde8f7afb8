"""The registry of losses. An entry holds everything that other code needs to know about a loss.

Losses are computed, and their projections initialised, in the order of the entries. The order
affects the last bits of a student: insert a new entry next to similar ones, and never reorder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from teachonce.student_train.losses.loss import FEATURES, Loss, Parameter
from teachonce.support.errors import UserError
from teachonce.support.packages import load_outside

if TYPE_CHECKING:
    from teachonce.store.format.features import OutputKind

HALVES = "half squared distances"
DEVIATIONS = "squared standard deviations of a channel"
A_LABEL = "nats per label"
ODDS = "squared log-odds"
ONE: OutputKind = "one label"
SEVERAL: OutputKind = "several labels"

LOSSES = (
    Loss("mlm", "logits.mlm", "nothing", "masked", "nats per masked token"),
    Loss("next", "next_token.next_token", "nothing", "next", "nats per token"),
    Loss(
        "next-inside",
        "next_token.next_inside",
        "edges",
        "next",
        "nats per token, 0 for each that begins where one of the teacher's begins",
    ),
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
    Loss(
        "in-batch", "states.contrastive", "vector", "vector", "nats", "widths differ", of_pairs=True
    ),
    Loss(
        "similarity",
        "vectors.similarity",
        "vector",
        "vector",
        "squared differences of cosines",
        of_pairs=True,
    ),
    Loss("similarity-kl", "vectors.similarity_kl", "vector", "vector", "nats", of_pairs=True),
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
        # In random draws, most pieces that a student predicts have a probability of zero.
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
        "nats per run",
        parameter=Parameter("T", "flatness", 100.0, 0.0, math.inf),
    ),
    Loss("ce", "task.ce", "gold", "classes", "nats per gold label", output_kind=ONE),
    Loss("kl", "task.kl", "classes", "classes", "nats", tempered=True, output_kind=ONE),
    Loss("kl", "task.kl_labels", "classes", "classes", A_LABEL, tempered=True, output_kind=SEVERAL),
    Loss("logit", "task.logit", "classes", "scores", "squared logits"),
    Loss("hard", "task.hard", "classes", "classes", "nats", output_kind=ONE),
    Loss("hard", "task.hard_labels", "classes", "classes", A_LABEL, output_kind=SEVERAL),
    Loss("log-odds", "task.log_odds", "classes", "scores", ODDS, output_kind=ONE),
    Loss("log-odds", "task.log_odds_labels", "classes", "scores", ODDS, output_kind=SEVERAL),
    Loss(
        "margin",
        "task.margin",
        "classes",
        "scores",
        "squared differences of two logits",
        of_pairs=True,
    ),
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
    if losses := named([name]):
        return losses
    base, colon, _ = name.partition(":")
    parameter = next((loss.parameter for loss in named([base]) if loss.parameter), None)
    if colon and parameter:
        within = f"above {parameter.low:g}"
        if parameter.high < math.inf:
            within = f"between {parameter.low:g} and {parameter.high:g}"
        raise UserError(
            f"--loss {name}: expected {base}:{parameter.letter} with a number {within}, such as"
            f" {base}:{parameter.default:g}"
        )
    loss = load_outside(name, GROUP, "--loss")
    if loss is None:
        return []
    if not isinstance(loss, Loss):
        raise UserError(
            f"--loss {name}: expected a Loss (teachonce.losses.Loss), got {type(loss).__name__}"
        )
    _check_sides(name, loss)
    # By the name that was given: `--loss`, weights and terms refer to it.
    _OUTSIDE[name] = replace(loss, name=name)
    return [_OUTSIDE[name]]


def _check_sides(name: str, loss: Loss) -> None:
    """Raise UserError for a loss with an unknown `projection`, or with sides (`teacher`, `student`)
    that no built-in loss compares."""
    sides: dict[str, dict[str, None]] = {"gold": {"classes": None, "scores": None}}
    for entry in LOSSES:
        sides.setdefault(entry.teacher, {})[entry.student] = None
    if loss.teacher not in sides:
        expected = f"teacher={loss.teacher!r}: expected one of {', '.join(sides)}"
    elif loss.student not in sides[loss.teacher]:
        expected = (
            f"student={loss.student!r}: with teacher={loss.teacher!r} expected one of"
            f" {', '.join(sides[loss.teacher])}"
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
    unique = sorted(set(names))
    outside = [_OUTSIDE[name] for name in sorted(_OUTSIDE) if name in unique]
    return [variant for loss in LOSSES for variant in loss.variants(unique)] + outside


def losses_for(output_kind: OutputKind | None, names: Iterable[str] | None = None) -> list[Loss]:
    """List the losses that a student can be trained with, in the order of the registry.

    output_kind: the kind of its task outputs; None for a student with an MLM head.
    names: the names to choose from, by default all.
    """
    other = "vocabulary" if output_kind else "task"
    names = [*loss_names(), *_OUTSIDE] if names is None else names
    losses = [loss for loss in named(names) if loss.head != other]
    return [loss for loss in losses if loss.output_kind in (None, output_kind)]


def reads_masked_tokens(losses: Collection[Loss]) -> bool:
    """Return whether an encoder without a task reads masked tokens in training with these losses.
    Losses of whole texts read unmasked text, unless another loss needs masked tokens."""
    return any(loss.student == "masked" for loss in losses) or not any(
        loss.of_vectors for loss in losses
    )


def features_read(losses: Iterable[Loss]) -> list[str]:
    """List the feature groups that losses read, in the order of `FEATURES`."""
    features = {loss.feature for loss in losses}
    return [feature for feature in FEATURES if feature in features]


def help_text() -> str:
    """List the names for `--help`, by the head that a student needs."""
    of_any, of_pieces, of_next, of_task = (
        ", ".join(dict.fromkeys(loss.shown for loss in LOSSES if (loss.head, loss.of_next) == kind))
        for kind in ((None, False), ("vocabulary", False), ("vocabulary", True), ("task", False))
    )
    return f"{of_any}; with an MLM head {of_pieces}; for a decoder {of_next}; for a task {of_task}"
