"""What a config.json says of a model's size, under the names that families of models give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = ("num_hidden_layers", "n_layers", "n_layer")  # in BERT, DistilBERT, GPT-2


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None where the config does not tell."""
    return next((config[name] for name in LAYERS if isinstance(config.get(name), int)), None)
