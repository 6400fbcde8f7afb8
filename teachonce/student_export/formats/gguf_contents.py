"""The content of a decoder's GGUF file by llama.cpp's names: sizes, vocabulary and weights.

The format is described in ggml/docs/gguf.md of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.checkpoints.declared import has_full_attention
from teachonce.student_train.model.decoder_sizes import Sizes
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.byte_level import PATTERNS

SILU, GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Architecture:
    """Describes how llama.cpp reads a family of transformers.

    name: its name in llama.cpp, and in `MODEL_ARCH` of the package gguf.
    activations: the activation functions that llama.cpp computes for it.
    rotary: whether the model has rotary position embeddings.
    weight: `weight(name, values, config)` returns the values as llama.cpp expects them.
    """

    name: str
    activations: tuple[str, ...]
    rotary: bool = True
    weight: Callable[[str, Array, Any], Array] = lambda name, values, config: values


def _paired(name: str, values: Array, config: Any) -> Array:
    """Order the rows of queries and keys by pairs (2i, 2i + 1), which llama.cpp rotates together.

    transformers rotates rows i and i + half of a head.
    """
    match = re.search(r"\.([qk])_proj\.", name)
    if not match:
        return values
    heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _output_first(name: str, values: Array, config: Any) -> Array:
    """Transpose the weights of GPT-2's Conv1D, which are [inputs, outputs]."""
    conv = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
    return values.T if conv else values


ARCHITECTURES = {
    "llama": Architecture("llama", SILU, weight=_paired),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU),
    "gpt2": Architecture("gpt2", GELU, rotary=False, weight=_output_first),
}
"""By `model_type` of config.json."""


def architecture_of(config: Any, where: str) -> Architecture:
    """Return how llama.cpp reads a decoder. Raises UserError, which names `where`, for a family
    that is not in ARCHITECTURES, and for settings that llama.cpp would ignore."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{where}: is a {kind}, and --to gguf writes {', '.join(ARCHITECTURES)}; use"
            f" convert_hf_to_gguf.py of llama.cpp{_or_onnx(config)}"
        )
    architecture = ARCHITECTURES[kind]
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = config.activation_function if kind == "gpt2" else config.hidden_act
    sliding = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    for field, value, wrong in (
        ("rope_type", scaled, scaled != "default"),
        ("activation function", activation, activation not in architecture.activations),
        ("attention", ", ".join(sorted(sliding)), bool(sliding)),
        ("scale_attn_weights", False, not getattr(config, "scale_attn_weights", True)),
        (
            "scale_attn_by_inverse_layer_idx",
            True,
            getattr(config, "scale_attn_by_inverse_layer_idx", False),
        ),
    ):
        if wrong:
            raise UserError(
                f"{where}: {field} {value} of its config.json is not written by --to gguf; use"
                f" convert_hf_to_gguf.py of llama.cpp{_or_onnx(config)}"
            )
    return architecture


def _or_onnx(config: Any) -> str:
    return ", or --to onnx" if has_full_attention(config) else ""


def sizes(config: Any, architecture: Architecture) -> dict[str, int | float]:
    """Return the sizes of a decoder by GGUF key; keys have no architecture prefix."""
    of = Sizes.of_loaded(config)
    metadata: dict[str, int | float] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": of.width,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": of.units,
        "attention.head_count": of.heads,
    }
    if not architecture.rotary:
        return metadata | {"attention.layer_norm_epsilon": float(config.layer_norm_epsilon)}
    return metadata | {
        "attention.head_count_kv": of.groups,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": of.head_size,
        "attention.value_length": of.head_size,
        "rope.dimension_count": of.head_size,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def weights(network: Any, architecture: Architecture, where: str) -> Iterator[tuple[str, Array]]:
    """Yield the weights of a decoder, float32, by their names in GGUF.

    An output layer that is tied to the embeddings is left out, as llama.cpp expects. Raises
    UserError for a weight that has no name in llama.cpp.
    """
    import gguf

    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(arch, network.config.num_hidden_layers)
    tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    for name, values in network.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UserError(f"{where}: its weight {name} has no name in GGUF; use --to onnx")
        plain = values.detach().float().numpy()
        yield target, np.ascontiguousarray(architecture.weight(name, plain, network.config))


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""
DIGITS = {"type": "Digits", "individual_digits": True}


def vocabulary(tokenizer: Any, rows: int, where: str) -> dict[str, Any]:
    """Return the vocabulary of a byte-level BPE by its keys in GGUF.

    rows: the number of rows of the embeddings. Raises UserError for a tokenizer that splits texts
        differently from llama.cpp.
    """
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = pattern_of(settings, where)
    named = {number: piece for piece, number in tokenizer.get_vocab().items()}
    # Rows without a piece are named as convert_hf_to_gguf.py of llama.cpp names them.
    pieces = [named.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [NORMAL if number in named else UNUSED for number in range(rows)]
    for token in settings["added_tokens"]:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    # Older releases of tokenizers write a merge as one text, newer ones as a pair.
    merges = (m if isinstance(m, str) else " ".join(m) for m in settings["model"]["merges"])
    first = tokenizer.backend_tokenizer.encode("a")
    metadata = {
        "model": "gpt2",  # byte-level BPE
        "pre": pre,
        "tokens": pieces,
        "token_type": kinds,
        "merges": list(merges),
        "add_bos_token": bool(first.special_tokens_mask[0]),
        "add_eos_token": bool(first.special_tokens_mask[-1]),
    }
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{where}: its tokenizer has no end-of-text token (eos_token), at which llama.cpp"
            " stops; name one in tokenizer_config.json"
        )
    for role in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        metadata |= {} if number is None else {f"{role}_token_id": number}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def pattern_of(settings: Mapping[str, Any], where: str) -> str:
    """Return llama.cpp's name of the pattern with which tokenizer.json splits a text into words.

    Raises UserError if llama.cpp has no such pattern.
    """
    parts = _parts(settings["pre_tokenizer"])
    normalizer = (settings["normalizer"] or {"type": "NFC"})["type"]
    plain = normalizer == "NFC" and settings["model"]["type"] == "BPE"
    if plain and parts and parts[-1]["type"] == "ByteLevel" and not parts[-1]["add_prefix_space"]:
        before, regex = parts[:-1], parts[-1].get("use_regex", True)
        if not before and regex:
            return "gpt-2"
        if len(before) == 1 and not regex and before[0]["type"] == "Split":
            split = before[0]
            as_usual = split["behavior"] == "Isolated" and not split["invert"]
            for name, pattern in PATTERNS.items():
                if as_usual and split["pattern"] == {"Regex": pattern}:
                    return name
        if before == [DIGITS] and regex:
            return "smollm"
    raise UserError(
        f"{where}: its tokenizer is not a byte-level BPE with a pattern that llama.cpp has"
        f" ({', '.join(PATTERNS)}, smollm); train the student with --vocab 8k, or use --to onnx"
    )


def _parts(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [dict(part) for part in pre_tokenizer["pretokenizers"]]
    return [dict(pre_tokenizer)]
