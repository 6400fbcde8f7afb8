"""Reads the texts of a prediction from the command line, a file of lines, a table or stdin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from teachonce.downstream.tasks.example_rows import PAIR, Row, read_rows, text_roles
from teachonce.downstream.tasks.word_windows import WORD_COLUMNS, joined
from teachonce.downstream.text_lines import check_unicode
from teachonce.student_predict.options import PredictOptions
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tables import cell_of, has_cell, is_table
from teachonce.teacher_dump.corpus.tagged_files import (
    TAGGED,
    check_untagged,
    is_tagged,
    tagged_layout,
    tagged_sentences,
)
from teachonce.teacher_dump.corpus.text_files import STDIN, read_lines, suffix_of

TAB = "\t"
WORDS = "; a file of word<TAB>tag lines has an empty line after each sentence, or the suffix .conll"
"""What else a person without a column of texts may have given."""


@dataclass(frozen=True)
class InputText:
    """Holds a text, or the two texts of a pair, and the place where it was given, for errors.

    words: (begin, end) of each word in characters, if the words were given; () if the predictor is
        to find them.
    """

    texts: tuple[str, ...]
    where: str
    words: tuple[tuple[int, int], ...] = ()

    @property
    def blank(self) -> bool:
        return not all(text.strip() for text in self.texts)


def input_texts(options: PredictOptions) -> list[InputText]:
    """Return the texts, including blank ones, so that the answers have the order of the lines.

    Raises UserError if all texts are blank, if texts and pairs are mixed, for a lone surrogate, and
    for a file that cannot be read.
    """
    try:
        items = list(_given(options))
    except OSError as error:
        where = f"--input {options.input}" if options.input else STDIN
        raise UserError(f"{where}: cannot be read: {error.strerror}; check the path") from None
    if all(item.blank for item in items):
        source = str(options.input or ("the texts" if options.texts else STDIN))
        raise UserError(f"{source}: has no text; give TEXT, --input FILE or lines on stdin")
    for item in items:
        for text in item.texts:
            check_unicode(text, item.where)
    sizes = {len(item.texts): item.where for item in items}
    if len(sizes) > 1:
        raise UserError(
            f"{sizes[1]} is a single text and {sizes[2]} a pair; give only single texts or only"
            " pairs"
        )
    return items


def _given(options: PredictOptions) -> Iterator[InputText]:
    path = options.input
    words = path is not None and str(path) != "-" and _has_words(path, options.columns)
    if options.columns and path is not None and (words or not is_table(path)):
        flags = ", ".join(f"--{role.replace('_', '-')}-column" for role in options.columns)
        raise UserError(
            f"{flags}: {path} is not a table, and only tables have columns; leave {flags} out, or"
            " give --input TABLE"
        )
    if options.texts:
        yield from _lines(options.texts, "TEXT", options.pairs)
    elif path is None or str(path) == "-":
        yield from _lines(read_lines(STDIN), f"{STDIN}, line", options.pairs)
    elif words:
        if options.pairs:
            raise UserError(f"--pairs: {path} has words with tags; leave --pairs out")
        # Before `is_table`, because a .tsv of words and tags has the suffix of a table.
        yield from _sentences(path)
    elif is_table(path):
        if options.pairs:
            raise UserError(
                f"--pairs: is for lines with a TAB, and {path} is a table, whose pairs are in the"
                " columns text_a and text_b; leave --pairs out"
            )
        yield from (_of_row(row, options.columns) for row in read_rows(path))
    else:
        if path.is_file():
            check_untagged(path)
        yield from _lines(read_lines(path), f"{path}, line", options.pairs)


def _has_words(path: Path, columns: dict[str, str]) -> bool:
    """Return whether a file has words and tags, one word per line. A .tsv is a table instead if its
    header has a column of texts, or one of `columns`."""
    return suffix_of(path) in TAGGED or (
        suffix_of(path) == ".tsv" and is_tagged(path, {"text", *PAIR, *columns.values()})
    )


def note_on_columns(options: PredictOptions) -> str | None:
    """Describe which columns and lines of a file of words and tags are read; None if all are read,
    and for any other file."""
    path = options.input
    if path is None or str(path) == "-" or not _has_words(path, options.columns):
        return None
    note = tagged_layout(path).note()
    return note and f"{path}: {note}"


def _sentences(path: Path) -> Iterator[InputText]:
    for sentence in tagged_sentences(path):
        for line, word, _ in sentence:
            if not word.strip():
                raise UserError(
                    f"{path}, line {line}: expected a word, got {word!r}; correct the line or"
                    " remove it"
                )
        yield _of_words([word for _, word, _ in sentence], f"{path}, line {sentence[0][0]}")


def _of_words(words: Sequence[str], where: str) -> InputText:
    text, spans = joined(words)
    return InputText((text,), where, tuple(spans))


def _lines(lines: Iterable[str], where: str, pairs: bool) -> Iterator[InputText]:
    for number, line in enumerate(lines, 1):
        if pairs and line.count(TAB) != 1 and line.strip():
            raise UserError(
                f"{where} {number}: expected two texts with a TAB between them, got"
                f" {line.count(TAB)} TABs in {line!r:.60}"
            )
        texts = tuple(line.split(TAB)) if pairs and line.strip() else (line,) * (1 + pairs)
        yield InputText(texts, f"{where} {number}")


def _of_row(row: Row, columns: dict[str, str]) -> InputText:
    """Return the text or the pair of a row; if the cell of the text is a list, its items are
    words."""
    names = ("text", *WORD_COLUMNS) if {*columns, *row}.isdisjoint(PAIR) else ()
    name = columns.get("text") or next((name for name in names if has_cell(row, name)), "text")
    words = cell_of(row, name) if has_cell(row, name) else None
    if not isinstance(words, list):
        roles = text_roles(row, columns, WORDS)
        return InputText(tuple(_cell(row, role, columns) for role in roles), row.where)
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise UserError(
            f"{row.where}: expected a list of words in column {name!r}, got {words!r:.60}; correct"
            " the row, or name the column of texts or words with --text-column"
        )
    return _of_words(words, row.where)


def _cell(row: Row, role: str, columns: dict[str, str]) -> str:
    value = row.cell(role, columns, WORDS)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{row.where}: expected text, got {value!r:.60}; name the column of texts")
    return value or ""
