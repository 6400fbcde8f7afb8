"""Stages of a training as data: the options of each, gradual unfreezing spelt out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teachonce.student_train.settings.option_fields import SEEDS
from teachonce.student_train.settings.options import UNFREEZE, TrainOptions
from teachonce.student_train.settings.shapes import Shape, parse_student

SEEDS_APART = 1009  # gives each stage other batches than the stage before it


def stages_of(options: TrainOptions, layers: int) -> list[TrainOptions]:
    """Return the options of each stage, of a student with so many layers.

    A stage with `unfreeze` becomes many, each of its length: the first trains the first part of
    that list, each further one a part more. What is not in the list keeps its weights. `top-down`
    stands for the head, a projection that is part of the student, each layer from the top, and the
    embeddings (gradual unfreezing: Howard & Ruder 2018, section 3.3; Mukherjee & Awadallah 2019,
    section 5.2, and 2020, algorithm 1).
    """
    every = [each for stage in options.stages for each in _unfrozen(stage, layers, options)]
    return [
        options.in_stage(stage, seed=(options.seed + SEEDS_APART * number) % SEEDS)
        for number, stage in enumerate(every or [{}])
    ]


def _unfrozen(stage: Mapping[str, Any], layers: int, options: TrainOptions) -> list[dict[str, Any]]:
    plain = {name: value for name, value in stage.items() if name != "unfreeze"}
    if len(plain) == len(stage):
        return [plain]
    always, order, moving = plain.get("freeze", options.freeze), stage["unfreeze"], set[str]()
    if order == UNFREEZE:
        order = [f"layers.{layer}" for layer in range(layers, 0, -1)]
        order = ["head", "projection", *order, "embeddings"]
        if options.projection != "student":
            order.remove("projection")  # which serves the losses alone, and moves all the time
            moving.add("projection")
    shape = parse_student(options.student)
    return [
        plain | {"freeze": (*always, *_asleep(moving.union(order[:count]), layers, shape))}
        for count in range(1, len(order) + 1)
    ]


def _asleep(awake: set[str], layers: int, shape: Shape) -> list[str]:
    """Name the parts of a student that keep their weights while those move that are awake."""
    found = []
    if "embeddings" not in awake:
        kinds = shape.kinds_of_embeddings
        found += (
            [kind for kind in kinds if kind not in awake]
            if awake.intersection(kinds)
            else ["embeddings"]
        )
    if "layers" not in awake:
        numbered = (f"layers.{layer}" for layer in range(1, layers + 1))
        found += [layer for layer in numbered if layer not in awake]
    return found + [part for part in ("head", "projection") if part not in awake]
