"""Which weights of a student are trained: parts of it may be frozen, or replaced by low-rank
changes of the linear layers (LoRA)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from teachonce.student_train.settings.options import UNFREEZE, TrainOptions
from teachonce.student_train.settings.shapes import Shape
from teachonce.support.errors import UserError
from teachonce.support.packages import library

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

OF_EMBEDDINGS = ("words", "positions", "types")
SCALE = 2
"""The alpha of LoRA divided by its rank: the factor by which the low-rank change is scaled."""


def group_of(name: str) -> str:
    """Return the part that a parameter belongs to: words, positions, types, embeddings (other
    parameters of the embeddings), layers.N (from 1), head or projection."""
    # `wpe`, `wte` and `h` are names of GPT-2, `embed_tokens` of Llama and Qwen, `tok_embeddings`
    # of ModernBERT.
    if re.search(r"(^|\.)projections?\.", name):
        return "projection"
    if re.search(r"position_embeddings|\.wpe\.", name):
        return "positions"
    if "token_type_embeddings" in name:
        return "types"
    if re.search(r"\.((word_|tok_)?embeddings?|embed_tokens|wte)\.weight$", name):
        return "words"
    if "embeddings" in name:
        return "embeddings"
    if match := re.search(r"\.(?:layers?|h)\.(\d+)\.", name):
        return f"layers.{int(match[1]) + 1}"
    return "head"


def _parts_of(shape: Shape) -> set[str]:
    layers = {f"layers.{number}" for number in range(1, shape.layers + 1)}
    return {"embeddings", "head", *layers, *shape.kinds_of_embeddings}


def _check_parts(where: str, named: set[str], options: TrainOptions) -> None:
    parts = {*_parts_of(options.shape), "layers"}
    if missing := sorted(named - {*parts, "projection"}):
        raise UserError(
            f"{where}{missing[0]}: a student {options.student} has no such part; it has"
            f" {', '.join(sorted(parts))} and the projection"
        )


def check_unfrozen(options: TrainOptions) -> None:
    """Check the `unfreeze` lists of all stages. Raises UserError for a part that the student does
    not have."""
    for number, stage in enumerate(options.stages, 1):
        order = stage.get("unfreeze", UNFREEZE)
        named = set() if order == UNFREEZE else set(order)
        _check_parts(f"stage {number}: unfreeze ", named, options)


def check_frozen(options: TrainOptions) -> None:
    """Check `--freeze`. Raises UserError for a part that the student does not have, and if nothing
    is left to train."""
    parts = _parts_of(options.shape)
    # A rotary student has no positions and types, so freezing them is harmless: recipes that freeze
    # them work for a ModernBERT as well.
    rotary = {"positions", "types"} if options.shape.positions == "rotary" else set()
    _check_parts("--freeze ", set(options.freeze) - rotary, options)
    if all(is_frozen(part, options) for part in (*parts, "projection")):
        raise UserError(
            f"--freeze {','.join(options.freeze)}: nothing is left to train; leave a part out"
        )


def check_rank(options: TrainOptions) -> None:
    """Raise UserError if `--lora` is above the smallest size of the linear layers: a product of
    larger matrices has no higher rank."""
    shape = options.shape
    heads = shape.head_size * shape.key_value_heads  # the output size of the key and value layers
    least = min(shape.width, heads, shape.feed_forward)
    if options.lora and options.lora > least:
        raise UserError(
            f"--lora {options.lora}: the smallest linear layer of a student {options.student} has"
            f" size {least}, so its changes have at most this rank; give --lora {least} or less"
        )


def is_frozen(part: str, options: TrainOptions) -> bool:
    """Return whether a part is frozen. `embeddings` includes words, positions and types; `layers`
    includes every layer."""
    frozen = {*options.freeze, *(["projection"] if options.projection == "frozen" else [])}
    group = "embeddings" if part in OF_EMBEDDINGS else part.split(".")[0]
    return bool({part, group} & frozen)


def set_frozen(model: nn.Module, options: TrainOptions) -> None:
    """Set `requires_grad` of every parameter by `--freeze`, `--projection frozen` and `--lora`."""
    for name, parameter in model.named_parameters():
        part = group_of(name)
        trained = options.lora is None or part == "projection" or ".lora_" in name
        parameter.requires_grad_(trained and not is_frozen(part, options))


def add_low_rank(student: PreTrainedModel, rank: int) -> None:
    """Add to each linear layer in the student's blocks a product of two matrices of this rank, at
    first zero (Hu et al. 2022, section 4.1).

    Raises UserError if peft is missing.
    """
    peft: Any = library("peft", "lora", "--lora")
    settings = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear")
    # Not `get_peft_model`: a PeftModel is not the PreTrainedModel that `any_student.py` requires.
    peft.inject_adapter_in_model(settings, student)


def merge_low_rank(student: PreTrainedModel) -> None:
    """Add the low-rank changes to the weights of their layers, and remove peft's modules."""
    # A list, as modules are replaced on the way.
    for name, module in list(student.named_modules()):
        if hasattr(module, "base_layer"):
            merged: Any = module
            merged.merge()
            parent, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(parent), attribute, merged.get_base_layer())
