"""The kinds of encoder that a student can be: how each is built, and where its parts lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

from store.errors import UserError

SIZES = {"tiny": (264, 3, 12)}
DEFAULT_KIND = "bert"


def _bert(width: int, layers: int, tokenizer: Any, **common: Any) -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,  # a small student underfits: dropout would only slow it down
            attention_probs_dropout_prob=0.0,
            **common,
        )
    )


def _modernbert(width: int, layers: int, tokenizer: Any, **common: Any) -> ModernBertForMaskedLM:
    return ModernBertForMaskedLM(
        ModernBertConfig(
            intermediate_size=2 * width,
            layer_types=["full_attention"] * layers,
            cls_token_id=tokenizer.cls_token_id,
            bos_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            eos_token_id=tokenizer.sep_token_id,
            **common,
        )
    )


KINDS: dict[str, Callable[..., PreTrainedModel]] = {
    "bert": _bert,  # Devlin et al. 2019
    "modernbert": _modernbert,  # Warner et al. 2024: rotary positions, normalised before a block
}
HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bert": lambda model, states: model.cls(states),
    "modernbert": lambda model, states: model.decoder(model.head(states)),
}


def parse_student(
    student: str, option: str = "--student ", default: str = DEFAULT_KIND
) -> tuple[str, tuple[int, int, int]]:
    """Kind, and width, layers and attention heads, of `[KIND:]tiny` or `[KIND:]HxLxA`.

    UserError for anything else; `option` is what stands before it on the command line, `default`
    the kind where none is named.
    """
    kind, _, size = student.rpartition(":")
    kind = kind or default
    if kind not in KINDS:
        raise UserError(
            f"{option}{student}: no kind of student is called {kind}; there are {', '.join(KINDS)}"
        )
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", size)
    if size not in SIZES and not found:
        raise UserError(
            f"{option}{student}: expected tiny or HxLxA (width x layers x heads, such as 264x3x12)"
        )
    width, layers, heads = SIZES[size] if size in SIZES else map(int, found.groups())  # type: ignore[union-attr]
    if min(width, layers, heads) < 1 or width % heads:
        raise UserError(
            f"{option}{student}: the width {width} must be a multiple of the {heads} heads, and all"
            " at least 1"
        )
    if layers > width:
        raise UserError(
            f"{option}{student}: {layers} layers of width {width}; the order is width x layers x"
            f" heads: {option}{layers}x{width}x{heads}?"
        )
    if kind == "modernbert" and width // heads % 2:
        raise UserError(
            f"{option}{student}: {width // heads} dimensions a head; rotary positions need an even"
            f" number: choose {heads * (width // heads + 1)} or fewer heads"
        )
    return kind, (width, layers, heads)


def make_student(
    student: str,
    tokenizer: Any,
    positions: int,
    option: str = "--student ",
    default: str = DEFAULT_KIND,
) -> PreTrainedModel:
    """A masked LM with random weights for the tokenizer's pieces and at most `positions` tokens.

    Raises UserError where `student` is no kind and size; see `parse_student`.
    """
    kind, (width, layers, heads) = parse_student(student, option, default)
    return KINDS[kind](
        width,
        layers,
        tokenizer,
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
    )


def lm_logits(student: PreTrainedModel, states: Tensor) -> Tensor:
    """LM-head logits [M,V] of flat last states [M,D]."""
    return HEADS[student.config.model_type](student, states)
