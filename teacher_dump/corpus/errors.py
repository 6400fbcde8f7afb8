"""The error of a corpus that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from teachonce.support.errors import UserError, suggest


class CorpusError(UserError):
    """A corpus that cannot be read."""


def no_column(
    name: str, columns: Iterable[str], where: object, remedy: str, role: str = ""
) -> CorpusError:
    """Make the error of a row or table that lacks a column, perhaps one of a `role`."""
    known = list(columns)
    listed = ", ".join(map(repr, known)) or "none"
    return CorpusError(
        f"{where}: no column {name!r}{role}; {suggest(name, known)}its columns are {listed};"
        f" {remedy}"
    )
