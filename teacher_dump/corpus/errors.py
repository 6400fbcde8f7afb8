"""Errors for a corpus that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from teachonce.support.errors import UserError, suggest


class CorpusError(UserError):
    """Raised for a corpus that cannot be read."""


def no_column(
    name: str, columns: Iterable[str], where: object, remedy: str, role: str = ""
) -> CorpusError:
    """Return the error for a row or table that lacks a column; `role` describes the column."""
    names = list(columns)
    listed = ", ".join(map(repr, names)) or "none"
    if any(" " in column for column in names):  # a name rarely has spaces, a text nearly always
        remedy += "; or, if these are a text and its label, add a header in front of them"
    return CorpusError(
        f"{where}: no column {name!r}{role}; {suggest(name, names)}its columns are {listed};"
        f" {remedy}"
    )
