"""A decoder whose key-value cache is among its inputs and outputs, with the names of Optimum and
transformers.js."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from teachonce.checkpoints.declared import has_full_attention
from teachonce.student_train.model.decoder_sizes import Sizes
from teachonce.support.errors import UserError

PAST = "past_key_values"
USAGE = """Continue a text, with transformers.js (`npm install @huggingface/transformers`):

```js
import { pipeline } from "@huggingface/transformers";
const write = await pipeline("text-generation", process.cwd(), { dtype: "DTYPE" });
console.log(await write("Once upon a time", { max_new_tokens: 40 }));
```"""
DTYPES = {"model.onnx": "fp32", "model_quantized.onnx": "q8", "model_q4.onnx": "q4"}
"""The `dtype` with which transformers.js looks for a file."""
# torch.export takes sizes of 0 and 1 for constants.
BATCH, TOKENS, BEFORE = 2, 4, 3  # sizes of the example: any number but 0 and 1


def usage(file: str, chats: bool) -> str:
    return USAGE.replace("DTYPE", DTYPES[file.rpartition("/")[2]])


class CachedNetwork(nn.Module):
    """Predicts next tokens from new tokens and the cache of the tokens before them.

    Its inputs are tokens [B,S], the mask [B,P+S] of all tokens so far and, for each layer, keys and
    values [B,H,P,D]. It returns logits [B,S,V] and the keys and values [B,H,P+S,D].

    Positions are counted in the mask, so that padding on the left changes nothing.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        past_length = past[0].shape[2]
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        every = torch.arange(mask.shape[1], device=mask.device)
        seen = every <= every[past_length:, None]
        allowed = seen[None, None] & mask.bool()[:, None, None]
        output = self.network(
            input_ids=ids,
            # transformers uses a mask of four dimensions unchanged; from two dimensions each family
            # makes its own mask. Not -inf: padding on the left attends to nothing, and its softmax
            # would be NaN.
            attention_mask=torch.where(allowed, 0.0, torch.finfo(torch.float32).min),
            # Clamped: padding on the left would have position -1.
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, past_length:],
            past_key_values=cache,
            use_cache=True,
        )
        layers: list[Any] = cache.layers
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return (output.logits, *tensors)


def traced(network: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of torch.onnx.export for a decoder: the module, inputs and further
    options. Raises UserError if a layer does not attend to all earlier tokens."""
    config = network.config
    if not has_full_attention(config):
        raise UserError(
            "--to onnx: not every layer of the decoder attends to all earlier tokens (see"
            " layer_types or sliding_window in its config.json), as the exported layers do; use"
            " convert_hf_to_gguf.py of llama.cpp, or run it in transformers"
        )
    return (
        CachedNetwork(network).eval(),
        _example(network),
        {
            "input_names": ["input_ids", "attention_mask", *cache_names(config, PAST)],
            "output_names": ["logits", *cache_names(config, "present")],
            "dynamic_shapes": _shapes(network),
        },
    )


def cache_names(config: Any, of: str) -> list[str]:
    """Return the names of the cache's keys and values, layer by layer. They begin with `of`: PAST
    for inputs, `present` for outputs."""
    layers = range(config.num_hidden_layers)
    return [f"{of}.{n}.{kind}" for n in layers for kind in ("key", "value")]


def _example(network: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return inputs with which to trace a `CachedNetwork`."""
    sizes = Sizes.of_loaded(network.config)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    mask = torch.ones(BATCH, BEFORE + TOKENS, dtype=torch.int64)
    names = cache_names(network.config, PAST)
    return ids, mask, [torch.zeros(BATCH, sizes.groups, BEFORE, sizes.head_size) for _ in names]


def _shapes(network: Any) -> tuple[Any, ...]:
    """Return, for each input, the axes that may have any size, with their names."""
    past = {0: "batch", 2: "past_sequence_length"}
    return (
        {0: "batch", 1: "sequence_length"},
        {0: "batch", 1: "total_sequence_length"},
        [past for _ in cache_names(network.config, PAST)],
    )
