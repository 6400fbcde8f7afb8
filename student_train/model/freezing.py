"""Freezing: which weights of a student move, and which keep what they were."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from teachonce.student_train.settings.options import UNFREEZE, TrainOptions
from teachonce.student_train.settings.shapes import Shape
from teachonce.support.errors import UserError

if TYPE_CHECKING:
    from torch import nn

OF_EMBEDDINGS = ("words", "positions", "types")


def group_of(name: str) -> str:
    """Name the part that a parameter belongs to: words, positions, types, embeddings (all else of
    these), layers.N (from 1), head or projection."""
    if re.search(r"(^|\.)projections?\.", name):
        return "projection"
    if "position_embeddings" in name:
        return "positions"
    if "token_type_embeddings" in name:
        return "types"
    if re.search(r"\.(word_|tok_)?embeddings?\.weight$", name):
        return "words"
    if "embeddings" in name:
        return "embeddings"
    if found := re.search(r"\.layers?\.(\d+)\.", name):
        return f"layers.{int(found[1]) + 1}"
    return "head"


def _parts(shape: Shape) -> set[str]:
    layers = {f"layers.{number}" for number in range(1, shape.layers + 1)}
    return {"embeddings", "head", *layers, *shape.kinds_of_embeddings}


def _check_parts(where: str, named: set[str], options: TrainOptions, shape: Shape) -> None:
    parts = {*_parts(shape), "layers"}
    if missing := sorted(named - {*parts, "projection"}):
        raise UserError(
            f"{where}{missing[0]}: a student {options.student} has no such part; it has"
            f" {', '.join(sorted(parts))} and the projection"
        )


def check_unfrozen(options: TrainOptions, shape: Shape) -> None:
    """Check the lists of stages that unfreeze: raise UserError where one names a part that such a
    student does not have."""
    for number, stage in enumerate(options.stages, 1):
        order = stage.get("unfreeze", UNFREEZE)
        named = set() if order == UNFREEZE else set(order)
        _check_parts(f"stage {number}: unfreeze ", named, options, shape)


def check_frozen(options: TrainOptions, shape: Shape) -> None:
    """Check `--freeze`: raise UserError where it names a part that such a student does not have, or
    leaves nothing to train."""
    parts = _parts(shape)
    # What a rotary student lacks, one need not let move.
    rotary = {"positions", "types"} if shape.positions == "rotary" else set()
    _check_parts("--freeze ", set(options.freeze) - rotary, options, shape)
    if all(is_frozen(part, options) for part in (*parts, "projection")):
        raise UserError(f"--freeze {','.join(options.freeze)}: nothing is left to train")


def is_frozen(part: str, options: TrainOptions) -> bool:
    """Tell whether a part keeps its weights; words, positions and types go with the embeddings,
    each layer with all."""
    frozen = {*options.freeze, *(["projection"] if options.projection == "frozen" else [])}
    with_it = "embeddings" if part in OF_EMBEDDINGS else part.split(".")[0]
    return bool({part, with_it} & frozen)


def set_frozen(model: nn.Module, options: TrainOptions) -> None:
    """Let exactly the parameters move that `--freeze` and a frozen projection leave."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(group_of(name), options))
