"""Loads word vectors (GloVe, fastText, word2vec as text) into a student's embeddings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from teachonce.align import Vocabulary
from teachonce.student_train.model.start_checks import no_word_vectors
from teachonce.support.errors import UserError

RANGE = 0.1  # of the uniform draws (Mukherjee & Awadallah 2019, section 6)
HEADER = re.compile(rb"\d+ +(\d+)\s*")  # in fastText and word2vec: number of words, vector size


def set_word_vectors(
    student: PreTrainedModel, tokenizer: Any, path: Path, others: bool = False
) -> str:
    """Set the embeddings of the pieces that are whole words of the file. Returns a line with their
    number.

    A line of the file is `word v1 v2 ...`, separated by spaces; the first line may be a header of
    two numbers. Case matters. The first line of a repeated word is used. Vectors are not scaled.
    others: draw all other pieces but the padding uniformly from -0.1 to 0.1 (Mukherjee & Awadallah
        2019, section 6).

    Raises UserError, with file and line, for an unreadable file, for a row that is not a word and D
    finite numbers (D is the embedding size), and if no piece is found.
    """
    embeddings: Any = student.get_input_embeddings().weight
    size, width = embeddings.shape
    piece_ids = _whole_words(tokenizer)
    vectors: dict[int, list[float]] = {}
    for line, word, fields in _read_rows(path, width):
        number = piece_ids.get(word)
        if number is not None and number not in vectors:
            vectors[number] = _parse_vector(fields, f"word vectors {path}, line {line}")
    if not vectors:
        raise UserError(
            f"word vectors {path}: none of the student's {size} pieces is a word of the file; use"
            " vectors of the text's language and case"
        )
    values = torch.tensor(list(vectors.values()))
    with torch.no_grad():
        if others:
            embeddings.uniform_(-RANGE, RANGE)
            # The padding's row is not trained (`padding_idx`) and would keep these random numbers.
            if tokenizer.pad_token_id is not None:
                embeddings[tokenizer.pad_token_id] = 0
        embeddings[torch.tensor(list(vectors))] = values.to(embeddings)
    return f"word embeddings of {len(vectors):,} of {size:,} pieces from {path.name}"


def _whole_words(tokenizer: Any) -> dict[bytes, int]:
    """Return the pieces that are whole words, in UTF-8, and their ids."""
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    return {
        piece.text: number
        for number, piece in enumerate(vocabulary.pieces)
        if (piece.begins or piece.free) and not vocabulary.special[number]
    }


def _read_rows(path: Path, width: int) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yield line number, word and `width` fields of each row."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = line.rstrip()
                if number == 1 and (header := HEADER.fullmatch(row)):
                    _check_size(path, 1, width, int(header[1]))
                elif row:
                    word, *fields = row.rsplit(b" ", width)
                    # Some words have spaces inside, but none of them ends in a number.
                    spaces = 0 if _number(word.rpartition(b" ")[2]) is None else word.count(b" ")
                    _check_size(path, number, width, len(fields) + spaces)
                    yield number, word, fields
    except OSError as error:
        raise no_word_vectors(path, error) from None


def _check_size(path: Path, line: int, expected: int, got: int) -> None:
    if got != expected:
        raise UserError(
            f"word vectors {path}, line {line}: expected a word and {expected} numbers, the size of"
            f" the student's embeddings, got {got}; repair the file, or choose --student"
            " bilstm:E,H with its vector size as E"
        )


def _parse_vector(fields: list[bytes], where: str) -> list[float]:
    values = list[float]()
    for field in fields:
        value = _number(field)
        if value is None or not math.isfinite(value):
            shown = field.decode(errors="replace")[:40]
            raise UserError(f"{where}: expected finite numbers after the word, got {shown!r}")
        values.append(value)
    return values


def _number(field: bytes) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
