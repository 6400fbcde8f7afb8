"""One text of a corpus with its gold labels, and the columns of a table that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teacher_dump.corpus.iob import BEGINNING, Step
from teacher_dump.corpus.utf8_lines import CorpusError

DEFAULT_COLUMN = "text"


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns of a table that hold the text and its label; None: found, or none."""

    text: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Gold:
    """What people say of a text: a label of all of it, or tags of its words (characters begin, end,
    and the tag), in order."""

    label: str | None = None
    tags: tuple[tuple[int, int, str], ...] = ()

    def steps(self) -> Iterator[Step]:
        """Each of the tags behind that of the word before."""
        before, expected = BEGINNING, 0
        for begin, end, tag in self.tags:
            yield before if begin == expected else None, tag
            before, expected = tag, end + 1  # one blank between words


@dataclass(frozen=True, slots=True)
class Row:
    """One text of a file, and the line (in .parquet the row) where it is; `tag_lines` are those of
    its tags."""

    text: str
    line: int
    gold: Gold | None = None
    tag_lines: tuple[int, ...] = ()


def choose_column(columns: list[str], textual: list[str], wanted: str | None, where: object) -> str:
    """The column that holds the text: the one wanted, else `text`, else the only textual one."""
    if wanted is None:
        if DEFAULT_COLUMN in columns:
            return _only(DEFAULT_COLUMN, columns, where)
        if len(textual) == 1:
            return _only(textual[0], columns, where)
        problem = "no column 'text'"
        remedy = "name the one that holds the text with --text-column"
    elif wanted in columns:
        return _only(wanted, columns, where)
    else:
        problem, remedy = f"no column {wanted!r}", "give one of them as --text-column"
    listed = ", ".join(map(repr, columns)) or "none"
    raise CorpusError(f"{where}: {problem}; its columns are {listed}; {remedy}")


def _only(name: str, columns: Sequence[str], where: object) -> str:
    if columns.count(name) > 1:
        raise CorpusError(
            f"{where}: {columns.count(name)} columns are named {name!r}; rename all but one"
        )
    return name


def check_label(columns: Sequence[str], wanted: str | None, where: object) -> None:
    """CorpusError unless there is the column of labels that is wanted."""
    if wanted is not None and wanted not in columns:
        raise CorpusError(
            f"{where}: no column {wanted!r} of labels; its columns are"
            f" {', '.join(map(repr, columns)) or 'none'}; give one of them as --label-column"
            " (texts without labels may come as .txt, or with an empty label)"
        )
    if wanted is not None:
        _only(wanted, columns, where)


def gold_of(value: Any, column: str | None, where: object) -> Gold | None:
    """A value of the column of labels: a name, or a number; a missing or empty one is no label."""
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
    """A value of the text column as text; a missing value (null) is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.40}"
        raise CorpusError(
            f"{where}: expected text in column {column!r}, got {got}; "
            f"is it the right --text-column?"
        )
    return value
