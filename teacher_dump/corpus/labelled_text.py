"""Holds one text of a corpus with its gold labels, and finds the columns of a table with both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teacher_dump.corpus.iob import BEGINNING, Step
from teacher_dump.corpus.tables import no_column
from teacher_dump.corpus.utf8_lines import CorpusError

DEFAULT_COLUMN = "text"


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns of a table that hold the text and its label.

    text: None for `text`, or the only column of texts.
    label: None where texts have no label.
    """

    text: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Gold:
    """Gold labels, given by people: one label of a whole text, or tags of its words.

    A tag is (first character, character behind the last, name); tags stand in the order of words.
    """

    label: str | None = None
    tags: tuple[tuple[int, int, str], ...] = ()

    def steps(self) -> Iterator[Step]:
        """Yield each tag together with the tag of the word before it."""
        before, expected = BEGINNING, 0
        for begin, end, tag in self.tags:
            yield before if begin == expected else None, tag
            before, expected = tag, end + 1  # one blank between words


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text of a file.

    line: where it stands (in .parquet the number of its row).
    tag_lines: the line of each of its tags.
    """

    text: str
    line: int
    gold: Gold | None = None
    tag_lines: tuple[int, ...] = ()


def choose_column(columns: list[str], textual: list[str], wanted: str | None, where: object) -> str:
    """Name the column that holds the text: the one wanted, else `text`, else the only textual one.

    Raises CorpusError where there is none, or several of that name.
    """
    if wanted in columns:
        chosen = wanted
    elif wanted is not None:
        raise no_column(repr(wanted), columns, where, "give one of them as --text-column")
    elif DEFAULT_COLUMN in columns:
        chosen = DEFAULT_COLUMN
    elif len(textual) == 1:
        chosen = textual[0]
    else:
        remedy = "name the one that holds the text with --text-column"
        raise no_column(repr(DEFAULT_COLUMN), columns, where, remedy)
    _check_single(chosen, columns, where)
    return chosen


def _check_single(name: str, columns: Sequence[str], where: object) -> None:
    if columns.count(name) > 1:
        raise CorpusError(
            f"{where}: {columns.count(name)} columns are named {name!r}; rename all but one"
        )


def check_label(columns: Sequence[str], wanted: str | None, where: object) -> None:
    """Raise CorpusError unless there is one column of labels with the name wanted (or none is)."""
    if wanted is None:
        return
    if wanted not in columns:
        remedy = (
            "give one of them as --label-column (texts without labels may come as .txt, or with an"
            " empty label)"
        )
        raise no_column(f"{wanted!r} of labels", columns, where, remedy)
    _check_single(wanted, columns, where)


def gold_of(value: Any, column: str | None, where: object) -> Gold | None:
    """Read a value of the column of labels, a name or a whole number; None where it is missing.

    Raises CorpusError for any other value.
    """
    if value is None or value == "" or value != value:  # pandas writes NaN for what is missing
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise CorpusError(
            f"{where}: expected a label in column {column!r}, its name or its number, got"
            f" {type(value).__name__} {value!r:.40}; is it the right --label-column?"
        )
    return Gold(str(value))


def text_of(value: Any, column: str, where: object) -> str:
    """Read a value of the text column; a missing value (null) is an empty text.

    Raises CorpusError for a value that is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.40}"
        raise CorpusError(
            f"{where}: expected text in column {column!r}, got {got}; "
            f"is it the right --text-column?"
        )
    return value
