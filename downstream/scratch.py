"""A masked LM from nothing: a WordPiece vocabulary of the text and a BERT with random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from store.errors import UserError

PREFIX = "scratch:"


@dataclass(frozen=True)
class Shape:
    """Layers x width x attention heads, as in `scratch:4x256x4`."""

    layers: int
    width: int
    heads: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `scratch:LxDxA`. Raises UserError where it is another or heads do not fit width."""
        found = re.fullmatch(r"scratch:(\d+)x(\d+)x(\d+)", text)
        if found is None or "0" in found.groups():
            raise UserError(
                f"model {text!r}: expected scratch:LAYERSxWIDTHxHEADS, e.g. scratch:4x256x4"
            )
        shape = cls(*map(int, found.groups()))
        if shape.width % shape.heads:
            raise UserError(
                f"model {text!r}: width {shape.width} is not a multiple of {shape.heads} heads; "
                f"try width {-(-shape.width // shape.heads) * shape.heads}"
            )
        return shape


def train_tokenizer(lines: Sequence[str], size: str, max_length: int) -> Any:
    """A cased WordPiece tokenizer of `size` (30k, 512) pieces that knows every character.

    Raises UserError where that is no size, the characters alone need more, or the text gives fewer.
    """
    from student_train.vocabulary import train_wordpiece, vocabulary_size

    pieces = vocabulary_size(size)
    if pieces is None:
        raise UserError(f"--vocab {size}: expected a number of pieces, e.g. 30k or 512")
    tokenizer = train_wordpiece(lines, pieces, None)
    tokenizer.model_max_length = max_length
    return tokenizer


def random_bert(shape: Shape, tokenizer: Any, max_length: int) -> Any:
    """A BertForMaskedLM with random weights whose positions start as sinusoids.

    Sinusoids (Vaswani et al. 2017, section 3.5) let one query-key map find a neighbour at every
    position, where random positions must be learnt one by one. They stay trainable.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,  # a small model that sees its text once has nothing to unlearn
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    position = torch.arange(max_length)[:, None]
    rate = torch.exp(torch.arange(0, shape.width, 2) * (-math.log(10000.0) / shape.width))
    waves = torch.stack([(position * rate).sin(), (position * rate).cos()], dim=-1).flatten(1)
    table = model.bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        table.copy_(waves[:, : shape.width] * (config.initializer_range * math.sqrt(2)))
    return model


def start_from_frequencies(model: Any, rows: npt.NDArray[np.int32]) -> None:
    """Set the decoder's bias to the log of each token's share of the blocks [n, S], plus one each.

    The best guess without a context is what the first hundreds of steps would learn.
    """
    import torch

    bias = model.cls.predictions.bias
    counts = np.bincount(rows.ravel(), minlength=len(bias)) + 1.0
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
