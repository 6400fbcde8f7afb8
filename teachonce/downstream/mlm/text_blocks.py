"""Reads text files and cuts them into equal blocks of tokens for masked-LM training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.files import READERS, has_columns, read_rows, table_texts
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN, Columns
from teachonce.teacher_dump.corpus.packed import suffix_of
from teachonce.teacher_dump.corpus.tables import is_table, open_table
from teachonce.teacher_dump.corpus.text_files import read_lines as all_lines

SMALL = 10_000
HELD_OUT_AT_MOST = 2000


def read_lines(path: Path) -> list[str]:
    """Read the non-blank lines of a UTF-8 text file, or the texts of any corpus file.

    Corpus files are those of teacher-dump: tables of texts, and files of words and tags.

    Raises UserError if the file is missing, empty or not UTF-8, and for a table that has several
    text columns and none of the name `text`.
    """
    try:
        texts = _texts(path)
        lines = [line for line in texts if line.strip()]
    except OSError as error:
        raise UserError(f"text {path}: cannot be read: {error.strerror}; check the path") from None
    if not lines:
        raise UserError(f"text {path}: has no text; give a file with a document a line")
    return lines


def _texts(path: Path) -> Iterator[str]:
    if is_table(path) and (path.is_dir() or has_columns(path, Columns())):
        return _column(path)
    if suffix_of(path) in READERS:
        return (row.text for row in read_rows(path, Columns()))
    return all_lines(path)


def _column(path: Path) -> Iterator[str]:
    table = open_table(path)
    names = [DEFAULT_COLUMN] if DEFAULT_COLUMN in table.columns else table.textual
    if len(names) != 1:
        listed = ", ".join(map(repr, table.columns)) or "none"
        raise UserError(
            f"{table.where}: expected a column {DEFAULT_COLUMN!r}, or a single column of texts, got"
            f" {listed}; rename the column that holds the text"
        )
    return (row.text for row in table_texts(table, Columns(names[0]), str(path)))


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
            for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
                yield np.asarray([*ids, sep], np.int32)
            bar.update(len(some))


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    source = iter(lines)
    while some := list(islice(source, size)):
        yield some
