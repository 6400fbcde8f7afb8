"""Holds out lines, and cuts lines into blocks of equal length for masked-LM training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError

SMALL = 10_000
HELD_OUT_AT_MOST = 2000


def hold_out(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split lines into training lines and held-out lines.

    Every 100th line is held out; every 20th if there are fewer than 10,000 lines. At most 2,000
    lines, spread evenly, are held out.

    Raises UserError if there are too few lines to hold any out.
    """
    step = max(100 if len(lines) >= SMALL else 20, math.ceil(len(lines) / HELD_OUT_AT_MOST))
    if len(lines) < step:
        raise UserError(
            f"training text: {counted(len(lines), 'line')}, too few to hold some out; add text, or"
            " give --dev"
        )
    # By line number and not at random: all seeds and a resumed training hold out the same lines.
    train = [line for number, line in enumerate(lines) if number % step != step - 1]
    return train, list(lines[step - 1 :: step])


def blocks(tokenizer: Any, lines: Sequence[str], length: int, what: str) -> Array:
    """Make blocks of token ids [n, length]: lines, separated by sep, between cls and sep.

    Tokens that do not fill a last block are dropped. Raises UserError if no block is filled.
    """
    return cut(tokenizer, tokens_of(tokenizer, lines, what), length, what)


def tokens_of(tokenizer: Any, lines: Sequence[str], what: str) -> Array:
    """Return the token ids [n] of lines, with a sep after each line."""
    pieces = list(_token_runs(tokenizer, lines, what))
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def tokens_per_character(flat: Array, lines: Sequence[str]) -> float:
    """Return the number of tokens (from `tokens_of`) per non-blank character."""
    characters = sum(len("".join(line.split())) for line in lines)
    # Less the sep that `tokens_of` puts after each line: it is not part of the text.
    return (len(flat) - len(lines)) / max(1, characters)


def cut(tokenizer: Any, flat: Array, length: int, what: str) -> Array:
    """Cut the token ids of `tokens_of` into blocks, as `blocks` does."""
    body = length - 2
    count = len(flat) // body
    if count == 0:
        raise UserError(
            f"{what}: {counted(len(flat), 'token')}, too few for one block of {length}; "
            "add text or lower --max-length"
        )
    packed = np.empty((count, length), np.int32)
    packed[:, 0] = tokenizer.cls_token_id
    packed[:, -1] = tokenizer.sep_token_id
    packed[:, 1:-1] = flat[: count * body].reshape(count, body)
    return packed


def _token_runs(tokenizer: Any, lines: Sequence[str], what: str) -> Iterator[Array]:
    sep = tokenizer.sep_token_id
    with tqdm(total=len(lines), desc=f"tokenise {what}", unit="line", disable=None) as bar:
        for some in _chunks(lines, 1000):
            # `verbose=False`: the warning of long texts would be wrong, as blocks are cut later.
            for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
                yield np.asarray([*ids, sep], np.int32)
            bar.update(len(some))


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    source = iter(lines)
    while some := list(islice(source, size)):
        yield some
