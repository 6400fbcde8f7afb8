"""Reads the texts of a file: the lines of a .txt, or the texts of any corpus file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.files import READERS, has_columns, read_rows, table_texts
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN, Columns
from teachonce.teacher_dump.corpus.tables import is_table, open_table
from teachonce.teacher_dump.corpus.text_files import read_lines as all_lines
from teachonce.teacher_dump.corpus.text_files import suffix_of


def check_unicode(text: str, where: str) -> str:
    """Return a text. Raises UserError for a lone surrogate, which no tokenizer accepts: an escape
    in JSON can give one, and a byte of a command line that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start + 1} is {text[error.start]!r}, half of a character"
            " or a byte that is not UTF-8; correct the text"
        ) from None
    return text


def read_lines(path: Path) -> list[str]:
    """Read the non-blank lines of a UTF-8 text file, or the texts of any corpus file.

    Corpus files, as of teacher-dump, are tables of texts, and files of words and tags.

    Raises UserError if the file is missing, empty or not UTF-8, for a text with a lone surrogate,
    and for a table that has several text columns and none of the name `text`.
    """
    return list(iterate_lines(path))


def iterate_lines(path: Path) -> Iterator[str]:
    """Yield the texts of `read_lines`, each as soon as it is read. Raises like `read_lines`."""
    empty = True
    try:
        for line in _texts(path):
            if line.strip():
                empty = False
                yield check_unicode(line, f"text {path}")
    except OSError as error:
        raise UserError(f"text {path}: cannot be read: {error.strerror}; check the path") from None
    if empty:
        raise UserError(f"text {path}: has no text; give a file with one document per line")


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
