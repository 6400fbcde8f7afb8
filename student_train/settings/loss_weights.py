"""The weights of losses, as `--loss` gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from teachonce.student_train.losses.registry import loss_names
from teachonce.support.errors import UserError, nearest

DEFAULT_LOSS: Mapping[str, float] = {"mlm": 1.0, "hidden": 30.0}
VECTOR_LOSS: Mapping[str, float] = {"embedding": 1.0, "similarity": 10.0}
STATES_LOSS: Mapping[str, float] = {"hidden": 3.0}
SCORE_LOSS: Mapping[str, float] = {"logit": 1.0, "margin": 1.0}
VECTOR_TEXTS = 128
"""For a store with vectors of texts: its losses, those of tokens beside them, and texts of a batch;
losses of scores."""


def parse_losses(words: str | tuple[str, ...]) -> dict[str, float]:
    """Read weights by name from `name=weight` words, repeated or as comma lists.

    Raises UserError for anything else.
    """
    weights: dict[str, float] = {}
    every = (words,) if isinstance(words, str) else words
    for word in (item.strip() for value in every for item in value.split(",")):
        name, _, weight = word.partition("=")
        try:
            found = float(weight or 1)
        except ValueError:
            raise UserError(f"--loss {word}: expected NAME=WEIGHT, such as kl=2") from None
        if name in weights:
            raise UserError(f"--loss {word}: {name} is given twice; give each loss one weight")
        weights[name] = found
    return weights


def check_losses(loss: Any) -> None:
    """Check the weights of losses: raise UserError for an unknown loss, and for a weight of 0 or
    less."""
    weights = loss.values() if isinstance(loss, Mapping) else ()
    if not weights or not all(isinstance(w, (int, float)) and 0 < w < math.inf for w in weights):
        raise UserError("--loss: at least one loss, each with a weight above 0")
    for name in loss:
        if name not in (known := loss_names()):
            near = nearest(name, known)
            raise UserError(f"--loss {name}: unknown; {near}there are {', '.join(known)}")
