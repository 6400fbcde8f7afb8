"""Stages of a training as data: what each learns from what, which weights move, when it ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from store import FeatureStore
from student_train.data.gold_labels import labelled
from student_train.model.kinds import Shape
from student_train.settings.options import LENGTH, SEEDS, TrainOptions, parse_losses
from support.errors import UserError

OF_STAGE = {
    "loss", "temperature", "targets", "view", "steps", "epochs", "batch_tokens", "lr",
    "warmup", "schedule", "mask_prob", "mask_words", "data", "freeze", "best", "eval_every",
}  # fmt: skip
"""Options that may differ from one stage to the next."""
UNFREEZE = "top-down"
SEEDS_APART = 1009  # so that a stage's batches are not those of the stage before


def stages_of(options: TrainOptions, layers: int) -> list[TrainOptions]:
    """The options of each stage, of a student with so many layers.

    A stage with `unfreeze` is many, each as long as it says: its first trains the head, each after
    it one more layer, from the top, the last all (gradual unfreezing: Howard & Ruder 2018, section
    3.3; Mukherjee & Awadallah 2019, section 3.4).
    """
    plain = replace(options, stages=())
    given = [
        each for stage in options.stages for each in _unfrozen(stage, layers, options.freeze)
    ] or [{}]
    found = []
    for number, stage in enumerate(given):
        length = dict.fromkeys(LENGTH) if LENGTH & stage.keys() else {}
        seed = (options.seed + SEEDS_APART * number) % SEEDS
        found.append(replace(plain, **{**length, **stage, "seed": seed}))
    return found


def check_stage(stage: Mapping[str, Any], where: str) -> None:
    """Raises UserError, naming `where`, for a setting that no stage has."""
    if unknown := sorted(stage.keys() - OF_STAGE - {"unfreeze"}):
        raise UserError(
            f"{where}: {unknown[0]} is no setting of a stage; there are"
            f" {', '.join(sorted({*OF_STAGE, 'unfreeze'}))}"
        )
    if stage.get("unfreeze", UNFREEZE) != UNFREEZE:
        raise UserError(f"{where}: unfreeze {stage['unfreeze']!r}: expected {UNFREEZE!r}")


def parse_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a command line or a recipe with losses as weights and parts to freeze as a tuple."""
    found = dict(values)
    if isinstance(loss := found.get("loss"), str | tuple):
        found["loss"] = parse_losses((loss,) if isinstance(loss, str) else loss)
    if "freeze" in found:
        words = found["freeze"].split(",")
        found["freeze"] = tuple(word.strip() for word in words if word.strip())
    return found


def _unfrozen(
    stage: Mapping[str, Any], layers: int, always: tuple[str, ...]
) -> list[dict[str, Any]]:
    plain = {name: value for name, value in stage.items() if name != "unfreeze"}
    if len(plain) == len(stage):
        return [plain]
    always = plain.get("freeze", always)
    asleep = ["embeddings", *(f"layers.{layer}" for layer in range(1, layers + 1))]
    return [plain | {"freeze": (*always, *asleep[:count])} for count in range(len(asleep), -1, -1)]


def group_of(name: str) -> str:
    """Where a parameter belongs: words, positions, embeddings (what they have beside these),
    layers.N (from 1), head or projection."""
    if re.search(r"(^|\.)projections\.", name):
        return "projection"
    if "position_embeddings" in name:
        return "positions"
    if re.search(r"\.(word_|tok_)?embeddings\.weight$", name):
        return "words"
    if "embeddings" in name:
        return "embeddings"
    if found := re.search(r"\.layers?\.(\d+)\.", name):
        return f"layers.{int(found[1]) + 1}"
    return "head"


def check_frozen(options: TrainOptions, shape: Shape) -> None:
    """Raises UserError where `--freeze` names a part that such a student does not have, or leaves
    nothing to train."""
    layers = {f"layers.{number}" for number in range(1, shape.layers + 1)}
    positions = {"positions"} if shape.positions else set()
    parts = {"embeddings", "words", "head", *layers, *positions}
    rotary = {"positions"} if shape.heads else set()  # are never trained
    if missing := sorted(set(options.freeze) - {*parts, *rotary, "layers", "projection"}):
        raise UserError(
            f"--freeze {missing[0]}: a student {options.student} has no such part; it has"
            f" {', '.join(sorted({*parts, 'layers'}))} and the projection"
        )
    if all(is_frozen(part, options) for part in (*parts, "projection")):
        raise UserError(f"--freeze {','.join(options.freeze)}: nothing is left to train")


def is_frozen(part: str, options: TrainOptions) -> bool:
    """Whether a part keeps its weights; words and positions go with the embeddings, each layer with
    all."""
    frozen = {*options.freeze, *(["projection"] if options.projection == "frozen" else [])}
    with_it = "embeddings" if part in ("words", "positions") else part.split(".")[0]
    return bool({part, with_it} & frozen)


def set_frozen(model: nn.Module, options: TrainOptions) -> None:
    """Let exactly the parameters move that `--freeze` and a frozen projection leave."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(group_of(name), options))


def chosen_blocks(store: FeatureStore, blocks: np.ndarray, options: TrainOptions) -> np.ndarray:
    """Of blocks [n,2] the runs of sequences that `--data` and `--min-length` let through.

    Raises UserError where none is left.
    """
    if options.data == "all" and not options.min_length:
        return blocks
    runs = [np.empty((0, 2), np.int64)]
    for begin, end in blocks.tolist():
        chosen = store.lengths(begin, end) >= options.min_length
        if options.data == "labelled":
            chosen &= labelled(store)[begin:end]
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        runs.append(edges.reshape(-1, 2) + begin)
    found = np.concatenate(runs)
    if not len(found):
        which = " with a gold label" if options.data == "labelled" else ""
        raise UserError(
            f"{store.path}: no sequence{which} of at least {options.min_length} tokens to"
            " train on; choose --data and --min-length accordingly, or dump such text"
        )
    return found
