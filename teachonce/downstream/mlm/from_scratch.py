"""Makes a masked LM from nothing: a WordPiece vocabulary of the text and random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from teachonce.downstream.options import KIND, OPTION
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.student_tokenizer import train_wordpiece
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.wordpiece import vocabulary_size


def train_tokenizer(lines: Sequence[str], size: str, max_length: int) -> Any:
    """Train a cased WordPiece tokenizer of `size` (30k, 512) pieces, or of all that the lines have
    to give, that knows every character.

    Raises UserError where `size` is no number of pieces, or the characters alone need more.
    """
    pieces = vocabulary_size(size)
    if pieces is None:
        raise UserError(f"--vocab {size}: expected a number of pieces, e.g. 30k or 512")
    tokenizer = train_wordpiece(lines, pieces, None)
    tokenizer.model_max_length = max_length
    return tokenizer


def random_encoder(size: str, tokenizer: Any, max_length: int) -> Any:
    """Make a masked LM of a student's kind and size with random weights.

    The kind is ModernBERT where `size` names none: with its rotary positions and normalisation
    before each block a model finds a token's neighbours within hundreds of steps; a BERT of that
    size, given thousands, still guessed from the bag of words.
    """
    return make_student(size, tokenizer, max_length, OPTION, KIND)


def start_from_frequencies(model: Any, rows: Array) -> None:
    """Set the decoder's bias to the log of each token's share of the blocks [n, S].

    Every token is counted once more than it occurs. This best guess without a context is what the
    first hundreds of steps would learn.
    """
    bias = model.get_output_embeddings().bias
    counts = np.bincount(rows.ravel(), minlength=len(bias)) + 1.0
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
