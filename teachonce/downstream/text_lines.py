"""Reads the texts of a file: the lines of a .txt, or the texts of any corpus file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.files import READERS, has_columns, read_rows, table_texts
from teachonce.teacher_dump.corpus.labelled_text import Columns
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


def read_lines(path: Path, column: str | None = None) -> list[str]:
    """Read the non-blank lines of a UTF-8 text file, or the texts of any corpus file.

    Corpus files, as of teacher-dump, are tables of texts, and files of words and tags.

    column: the column of the texts if the file is a table; None for the column `text`, or else for
        the only column that has texts.

    Raises UserError if the file is missing, empty or not UTF-8, for a text with a lone surrogate,
    and for a table that lacks the column, or that has several columns of texts and none is called
    `text`.
    """
    return list(iterate_lines(path, column))


def iterate_lines(path: Path, column: str | None = None) -> Iterator[str]:
    """Yield the texts of `read_lines`, each as soon as it is read. Raises like `read_lines`."""
    empty = True
    try:
        for line in _texts(path, column):
            if line.strip():
                empty = False
                yield check_unicode(line, f"text {path}")
    except OSError as error:
        raise UserError(f"text {path}: cannot be read: {error.strerror}; check the path") from None
    if empty:
        raise UserError(f"text {path}: has no text; give a file with one document per line")


def _texts(path: Path, column: str | None) -> Iterator[str]:
    if is_table(path) and (path.is_dir() or has_columns(path, Columns(column))):
        texts = table_texts(open_table(path), Columns(column), str(path))
        return (row.text for row in texts)
    if suffix_of(path) in READERS:
        return (row.text for row in read_rows(path, Columns()))
    return all_lines(path)
