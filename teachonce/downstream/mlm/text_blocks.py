"""Holds out lines, and cuts lines into blocks of equal length for masked-LM training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError

SMALL = 10_000
HELD_OUT_AT_MOST = 2000
AT_ONCE = 1000  # lines that are tokenized at once


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


def blocks(tokenizer: Any, lines: Sequence[str], length: int, name: str) -> Array:
    """Make blocks of token ids [n, length]: cls, tokens of lines with a sep after each line, sep.

    Tokens that do not fill a last block are dropped. Raises UserError if no block is filled.
    """
    return cut(tokenizer, line_tokens(tokenizer, lines, name), length, name)


def line_tokens(tokenizer: Any, lines: Sequence[str], name: str) -> Array:
    """Return the token ids [n] of lines, with a sep token after each line."""
    pieces = list(_token_runs(tokenizer, lines, name))
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


@dataclass(frozen=True)
class Spelling:
    """Holds counts of a tokenized text.

    tokens: its tokens, without unknown tokens.
    characters: the non-blank characters in these tokens.
    unknown: the non-blank characters in unknown tokens.
    """

    tokens: int
    characters: int
    unknown: int

    @property
    def unknown_share(self) -> float:
        """Return the share of the text's non-blank characters that are in unknown tokens."""
        return self.unknown / max(1, self.characters + self.unknown)


def spelling(tokenizer: Any, flat: Array, lines: Sequence[str]) -> Spelling:
    """Count tokens and characters of lines, whose token ids (from `line_tokens`) are `flat`."""
    has_unknown = bool(np.any(flat == tokenizer.unk_token_id))
    missing, unknown = _unknown(tokenizer, lines) if has_unknown else (0, 0)
    characters = sum(_characters(line) for line in lines)
    # `- len(lines)`: the sep that `line_tokens` puts after each line is not part of the text.
    return Spelling(len(flat) - len(lines) - missing, characters - unknown, unknown)


def _unknown(tokenizer: Any, lines: Sequence[str]) -> tuple[int, int]:
    """Count the unknown tokens of lines, and the non-blank characters in these tokens."""
    # Lines are tokenized again without sep, because sep and the unknown token may have the same id.
    tokens = characters = 0
    for begin in range(0, len(lines), AT_ONCE):
        batch = list(lines[begin : begin + AT_ONCE])
        encoded = tokenizer(
            batch, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        for line, *pair in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            for number, (first, last) in zip(*pair, strict=True):
                if number == tokenizer.unk_token_id:
                    tokens += 1
                    characters += _characters(line[first:last])
    return tokens, characters


def _characters(text: str) -> int:
    return len("".join(text.split()))


def cut(tokenizer: Any, flat: Array, length: int, name: str) -> Array:
    """Cut the token ids of `line_tokens` into blocks, int32 [n, length]. Raises UserError, which
    names the text by `name`, if there are too few ids for one block."""
    body = length - 2
    count = len(flat) // body
    if count == 0:
        raise UserError(
            f"{name}: {counted(len(flat), 'token')}, too few for one block of {length}; "
            "add text or lower --max-length"
        )
    packed = np.empty((count, length), np.int32)
    packed[:, 0] = tokenizer.cls_token_id
    packed[:, -1] = tokenizer.sep_token_id
    packed[:, 1:-1] = flat[: count * body].reshape(count, body)
    return packed


def _token_runs(tokenizer: Any, lines: Sequence[str], name: str) -> Iterator[Array]:
    sep = tokenizer.sep_token_id
    with tqdm(total=len(lines), desc=f"tokenize {name}", unit="line", disable=None) as bar:
        for begin in range(0, len(lines), AT_ONCE):
            batch = list(lines[begin : begin + AT_ONCE])
            # `verbose=False`: a warning about long texts would be wrong, as blocks are cut later.
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                yield np.asarray([*ids, sep], np.int32)
            bar.update(len(batch))
