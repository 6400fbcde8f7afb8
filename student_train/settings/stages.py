"""Stages of a training as data: the options of each, gradual unfreezing spelt out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from student_train.settings.options import SEEDS, TrainOptions

SEEDS_APART = 1009  # gives each stage other batches than the stage before it


def stages_of(options: TrainOptions, layers: int) -> list[TrainOptions]:
    """Return the options of each stage, of a student with so many layers.

    A stage with `unfreeze` becomes many, each of its length. The first trains the head, each
    further one a layer more, from the top, and the last all weights (gradual unfreezing: Howard &
    Ruder 2018, section 3.3; Mukherjee & Awadallah 2019, section 3.4).
    """
    every = [each for stage in options.stages for each in _unfrozen(stage, layers, options.freeze)]
    return [
        options.in_stage(stage, seed=(options.seed + SEEDS_APART * number) % SEEDS)
        for number, stage in enumerate(every or [{}])
    ]


def _unfrozen(
    stage: Mapping[str, Any], layers: int, always: tuple[str, ...]
) -> list[dict[str, Any]]:
    plain = {name: value for name, value in stage.items() if name != "unfreeze"}
    if len(plain) == len(stage):
        return [plain]
    always = plain.get("freeze", always)
    asleep = ["embeddings", *(f"layers.{layer}" for layer in range(1, layers + 1))]
    return [plain | {"freeze": (*always, *asleep[:count])} for count in range(len(asleep), -1, -1)]
