"""The scale of the scores that a head of `--task pair` gives: standardised scores in training, the
scale of the examples in a saved folder."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from teachonce.checkpoints.declared import declared_kind

MEAN, DEVIATION = "score_mean", "score_deviation"
"""Fields of config.json: the scale that `unstandardise` gave the head."""
IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


def unstandardise(network: Any, mean: float, deviation: float) -> bool:
    """Change the last layer of a head so that it returns d * score + m, where d is `deviation` and
    m is `mean`. Record both in the config.

    CrossEncoder then gives these scores, too, without its sigmoid. Returns False and changes no
    weight if the head's last layer has no bias.
    """
    # CrossEncoder applies a sigmoid to a single output by default.
    network.config.sentence_transformers = IDENTITY
    if not _scale(network, deviation, mean):
        return False
    network.config.update({MEAN: mean, DEVIATION: deviation})
    return True


def standardise(network: Any, config: Any) -> None:
    """Undo `unstandardise` in a network that was loaded from a folder with `config`."""
    mean, deviation = (getattr(config, name, math.nan) for name in (MEAN, DEVIATION))
    # An encoder or a masked LM that was trained from such a network has these fields in its config,
    # but not the head.
    if declared_kind({"architectures": config.architectures}) != "classification":
        return
    # config.json is untrusted.
    finite = all(isinstance(value, float) and math.isfinite(value) for value in (mean, deviation))
    if finite and deviation > 0:
        _scale(network, 1 / deviation, -mean / deviation)


def remove_scale(config: Any) -> None:
    """Remove the scale and the activation from a config, because they belong to an earlier head."""
    if getattr(config, "sentence_transformers", None) == IDENTITY:
        del config.sentence_transformers
    for name in (MEAN, DEVIATION):
        vars(config).pop(name, None)


@torch.no_grad()
def _scale(network: Any, factor: float, shift: float) -> bool:
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    if last.out_features != 1 or last.bias is None:
        return False
    last.weight.mul_(factor)
    last.bias.mul_(factor).add_(shift)
    return True
