"""Read cached vectors of sentence-transformers: a folder of `datasets` with texts and labels.

After the examples of distillation in github.com/UKPLab/sentence-transformers, version 6.2: the
teacher's vectors are in the column `label`, for MSELoss, and `save_to_disk` writes the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample
from teachonce.feature_store.captures.schema import Numbers
from teachonce.feature_store.captures.tables import Table, numbers, open_table
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.errors import UserError

LABEL = "label"
VECTOR = Numbers(LABEL, "states", ("numbers",))


def recognises(path: Path) -> bool:
    """Return whether a path holds a table of texts with vectors."""
    table = open_table(path)
    return table is not None and _has_vectors(table)


def _has_vectors(table: Table) -> bool:
    import pyarrow

    if LABEL not in table.columns:
        return False
    kind = table.schema.field(LABEL).type
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in lists) and pyarrow.types.is_floating(kind.value_type)


def _text_columns(table: Table) -> list[str]:
    import pyarrow

    kinds = {name: table.schema.field(name).type for name in table.columns}
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    return [name for name, kind in kinds.items() if any(is_one(kind) for is_one in is_text)]


class CachedVectors:
    """Reads a table of texts with vectors."""

    def __init__(self, options: ImportOptions, teacher: TeacherFiles) -> None:
        table = open_table(options.source)
        if table is None or not _has_vectors(table):
            raise UserError(
                f"{options.source}: no table with a column {LABEL} of vectors; its columns are"
                f" {', '.join(table.columns) if table else 'none'}: check the path and --format"
            )
        self._table: Table = table
        texts = _text_columns(table)
        chosen = [options.text_column] if options.text_column else texts
        if len(chosen) != 1 or chosen[0] not in texts:
            problem = (
                f"--text-column {options.text_column}: there is no such column of texts"
                if options.text_column
                else f"give --text-column NAME, the column whose vectors are in {LABEL}"
            )
            raise UserError(
                f"{options.source}: {problem}; its columns of texts are"
                f" {', '.join(texts) or 'none'}"
            )
        self._column = chosen[0]
        self.contents = CaptureContents(vector=self._width())
        self.settings: dict[str, Any] = {"text_column": self._column}

    def _width(self) -> int:
        for where, cells in self._table.rows([LABEL]):
            if width := len(numbers(VECTOR, cells[LABEL], where)):
                return width
            raise UserError(f"{where}: a vector without numbers; remove this row")
        raise UserError(f"{self._table.path}: holds no row; nothing to import")

    def files(self) -> list[Path]:
        """Return the files of the table."""
        return list(self._table.files)

    def samples(self) -> Iterator[Sample]:
        """Yield the text of each row."""
        for where, cells in self._table.rows([self._column, LABEL]):
            text = cells[self._column].as_py()
            if text is None:
                raise UserError(f"{where}: column {self._column} has no text; remove this row")
            yield Sample(where, partial(self._rows, cells[LABEL], where), text=text)

    def _rows(self, cell: Any, where: str) -> Rows:
        found = numbers(VECTOR, cell, where)
        if len(found) != self.contents.vector:
            raise UserError(
                f"{where}: a vector of {len(found)} numbers, and the first row has"
                f" {self.contents.vector}; remove this row"
            )
        return Rows(vector=found)


FORMAT = Format(
    "sentence-transformers", recognises, CachedVectors, frozenset({"text_column", "max_length"})
)
