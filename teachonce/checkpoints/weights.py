"""Checks that transformers loaded all weights of a checkpoint, and that quantised weights have
their scales."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from teachonce.support.errors import UserError

# The names of buffers end like this. Older releases of transformers saved them; newer ones compute
# them.
BUFFERS = ("inv_freq", "position_ids", "attn.bias", "masked_bias")
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")  # dtypes in safetensors


def check_all_read(network: Any, unexpected: Sequence[str], name: str) -> None:
    """Raise UserError if the checkpoint has weights of layers that the network does not load, or if
    transformers ignored a quantisation.

    unexpected: names of weights that the network does not have.
    """
    base = network.base_model
    lists = [n for n, m in base.named_modules() if isinstance(m, torch.nn.ModuleList)]
    # Only weights of layers: a checkpoint may have other heads than the one that is loaded.
    of_layers = [
        key
        for key in unexpected
        if not key.endswith(BUFFERS)
        and (stem := re.match(r"(.+?)\.\d+\.", key))
        # Names with or without the prefix of the base model, such as `bert.`.
        and any(f".{stem[1]}".endswith(f".{n}") for n in lists)
    ]
    if of_layers:
        raise UserError(
            f"{name}: its layers have {len(of_layers)} weights that {type(network).__name__} does"
            f" not read, first {of_layers[0]}: config.json has fewer layers than the weights, or"
            " they are an adapter or scales; correct config.json, or save the merged model again"
        )
    method = getattr(network.config, "quantization_config", None)
    if method and not getattr(network, "is_quantized", False):
        raise UserError(
            f"{name}: quantization_config of its config.json names a method that transformers does"
            " not have; save the checkpoint without quantisation (dequantize)"
        )


def check_no_whole_numbers(network: Any, folder: Path, name: str) -> None:
    """Raise UserError for weights that are stored as integers without a quantisation config.

    folder: the checkpoint's folder; it may be missing.
    """
    # Integers need the scales of a quantisation; transformers would load them without scales.
    if getattr(network, "is_quantized", False):
        return
    parameters = {key for key, _ in network.named_parameters()}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in parameters.intersection(file.keys()):
                if (kind := file.get_slice(key).get_dtype()) in INTEGERS:
                    raise UserError(
                        f"{name}: {key} in {path.name} holds whole numbers ({kind}), and its"
                        " config.json has no quantization_config that defines them; save"
                        " the checkpoint without quantisation (dequantize)"
                    )
