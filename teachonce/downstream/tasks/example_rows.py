"""Rows of example tables, whose cells are read by role: text, label, answer and so on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from teachonce.downstream.text_lines import check_unicode
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tables import (
    TABLES,
    cell_of,
    has_cell,
    is_table,
    named_rows,
    names_in,
)
from teachonce.teacher_dump.corpus.text_files import no_column, read_lines, suffix_of


class Row(dict[str, Any]):
    """Holds the cells of a row by column. `where` is its file and line, `header` the line that
    names its columns, for errors."""

    def __init__(self, where: str, cells: Mapping[str, Any], header: str) -> None:
        super().__init__(cells)
        self.where, self.header = where, header

    def cell(self, role: str, columns: Mapping[str, str], hint: str = "") -> Any:
        """Return the cell of the column `columns[role]`, or of the column `role` by default.

        hint: text that the error adds to its remedy. Raises UserError if there is no such column.
        """
        name = columns.get(role, role)
        if not has_cell(self, name):
            option = f"--{role.replace('_', '-')}-column"
            remedy = f"rename one, or name the right one with {option}{hint}"
            raise no_column(name, names_in(self), self.header, remedy)
        return cell_of(self, name)

    def text(self, role: str, columns: Mapping[str, str]) -> str:
        """Return the text in the cell of `role`. Raises UserError if the cell is blank, is not
        text, or has a lone surrogate."""
        value = self.cell(role, columns)
        if not isinstance(value, str) or not value.strip():
            got = "nothing" if value is None or value == "" else f"{value!r:.60}"
            raise UserError(
                f"{self.where}: expected text in column {columns.get(role, role)!r}, got {got}; "
                "correct the row or remove it"
            )
        return check_unicode(value, self.where)


PAIR = ("text_a", "text_b")
"""The roles of the two texts of a pair, in the order of the model's input."""


def text_roles(row: Row, columns: Mapping[str, str], hint: str = "") -> tuple[str, ...]:
    """Return the roles of a row's texts: `text_a` and `text_b` if `columns` names one of these, or
    if the row has such a column and none of the role `text`; else `text`.

    hint: see `Row.cell`. Raises UserError if there is no column of texts.
    """
    named = not columns.keys().isdisjoint(PAIR)
    met = "text" not in columns and "text" not in row and not row.keys().isdisjoint(PAIR)
    if named or met:
        return PAIR
    row.cell("text", columns, f" (pairs: --text-a-column, --text-b-column){hint}")
    return ("text",)


def check_columns(path: Path, task: str, columns: Mapping[str, str]) -> None:
    """Raise UserError if the first row of a table lacks a column of the task. Files in other
    layouts are not checked. Imports no torch."""
    if task not in ("classify", "pair", "sts", "qa") or (task == "qa" and is_squad(path)):
        return
    first = next(iterate_rows(path))
    label = {"classify": ("label",), "qa": ()}.get(task, ("score",))
    texts = {"classify": text_roles(first, columns), "qa": ("question", "context")}.get(task, PAIR)
    for role in (*texts, *label):
        first.cell(role, columns)


def is_squad(path: Path) -> bool:
    """Return whether a file has SQuAD's layout: a JSON object, not an array of rows."""
    if path.is_dir() or suffix_of(path) != ".json":
        return False
    # The reader requests one byte more than `longest`, which must fit into a C ssize_t.
    lines = (line.lstrip() for line in read_lines(path, longest=sys.maxsize - 1))
    return not next(filter(None, lines), "").startswith("[")


def read_rows(path: Path) -> list[Row]:
    """Read the non-blank rows of a table, at least one.

    Raises UserError with file and line for a row that cannot be read, and for a table without rows.
    """
    return list(iterate_rows(path))


def iterate_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of `read_rows`, each as soon as it is read. Raises like `read_rows`."""
    if not is_table(path):
        expected = f"a file that ends in {', '.join(TABLES)}"
        raise UserError(
            f"{path}: expected {expected}, or a folder that save_to_disk of datasets wrote; convert"
            " or rename it"
        )
    row = None
    try:
        for where, cells, header in named_rows(path):
            row = Row(where, cells, header)
            yield row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    if row is None:
        raise UserError(f"{path}: has no rows; give a header and a row for each example")
