"""A masked LM from nothing: a WordPiece vocabulary of the text and a BERT with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BertForMaskedLM

from store.errors import UserError
from student_train.student import student_config
from student_train.vocabulary import train_wordpiece, vocabulary_size

PREFIX = "scratch:"
OPTION = f"--model {PREFIX}"


def train_tokenizer(lines: Sequence[str], size: str, max_length: int) -> Any:
    """A cased WordPiece tokenizer of `size` (30k, 512) pieces that knows every character.

    Raises UserError where that is no size, the characters alone need more, or the text gives fewer.
    """
    pieces = vocabulary_size(size)
    if pieces is None:
        raise UserError(f"--vocab {size}: expected a number of pieces, e.g. 30k or 512")
    tokenizer = train_wordpiece(lines, pieces, None)
    tokenizer.model_max_length = max_length
    return tokenizer


def random_bert(size: str, tokenizer: Any, max_length: int) -> Any:
    """A BertForMaskedLM of a student's size (HxLxA) with random weights whose positions start as
    sinusoids.

    Sinusoids (Vaswani et al. 2017, section 3.5) let one query-key map find a neighbour at every
    position, where random positions must be learnt one by one. They stay trainable.
    """
    config = student_config(size, len(tokenizer), max_length, tokenizer.pad_token_id, OPTION)
    model, width = BertForMaskedLM(config), config.hidden_size
    position = torch.arange(max_length)[:, None]
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    waves = torch.stack([(position * rate).sin(), (position * rate).cos()], dim=-1).flatten(1)
    table = model.bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        table.copy_(waves[:, :width] * (config.initializer_range * math.sqrt(2)))
    return model


def start_from_frequencies(model: Any, rows: npt.NDArray[np.int32]) -> None:
    """Set the decoder's bias to the log of each token's share of the blocks [n, S], plus one each.

    The best guess without a context is what the first hundreds of steps would learn.
    """
    bias = model.cls.predictions.bias
    counts = np.bincount(rows.ravel(), minlength=len(bias)) + 1.0
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
