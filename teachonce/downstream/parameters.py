"""The parameters of the command, with the help that its options and their settings give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from teachonce.downstream.options import FINE_TUNED, MTEB, OPTIONS, TASKS, TRAINED, Asked, as_paths
from teachonce.downstream.settings import KINDS
from teachonce.support.options import click_option, default_of, options_of

GROUPS = {
    "The ten that matter most": (
        *("task", "model", "train", "dev", "test", "out", "as_is", "save", "epochs", "lr"),
    ),
    "Training": (
        *("seeds", "seed", "steps", "batch_size", "accumulate", "optimizer", "warmup"),
        *("max_length", "stride", "precision", "group_by_length", "limit", "per_class"),
    ),
    "Masked LM": ("vocab", "mask_prob", "batch_tokens", "evaluate_every", "resume"),
    "Labels": ("unseen_labels", "pieces"),
    "Columns": (
        *("text_column", "label_column", "text_a_column", "text_b_column", "score_column"),
        *("question_column", "context_column", "answer_column"),
    ),
    "Rankings and speed": (
        *("teacher", "documents_by", "candidates", "candidates_by", "depth", "repeat"),
    ),
    "Output": ("log", "json"),
}
"""Headings of --help, and the options under each."""


def parameters() -> list[click.Parameter]:
    """Every option of `Asked` for the command, and RUN."""
    found: list[click.Parameter] = []
    for name in OPTIONS:
        if name != "runs":
            plural: dict[str, Any] = {"metavar": "PATH"} if OPTIONS[name].read is as_paths else {}
            if name == "task":
                plural = {"metavar": "[" + "|".join(TASKS).replace(MTEB, f"{MTEB}:NAME") + "]"}
            found.append(click_option(Asked, name, help=_help(name), **plural))
    runs = click.Argument(["runs"], nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
    return [*found, runs]


def _help(name: str) -> str:
    """Which tasks take it (unless every training does), what it is, default and range."""
    about = OPTIONS[name]
    tasks = [task for task in TASKS if task in about.scope]
    if set(FINE_TUNED) <= set(tasks):
        tasks = ["fine-tuning", *(task for task in tasks if task not in FINE_TUNED)]
    told = "" if set(TRAINED) <= about.scope else f"{', '.join(tasks)}: "
    default = about.told_default or _default(name)
    extra = [f"default: {default}"] if default else []
    extra += [about.within.expected] if about.within else []
    return f"{told}{about.help}" + (f"  [{'; '.join(extra)}]" if extra else "")


def _default(name: str) -> str:
    """What the kinds of work take where nothing is given."""
    kinds: dict[Any, list[str]] = {}
    for kind, settings in KINDS.items():
        default = default_of(settings, name) if name in options_of(settings) else None
        if default is not None and default is not False:
            kinds.setdefault(default, []).append(kind)
    if len(kinds) == 1:
        return "".join(map(_number, kinds))
    return ", ".join(f"{' and '.join(some)} {_number(value)}" for value, some in kinds.items())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
