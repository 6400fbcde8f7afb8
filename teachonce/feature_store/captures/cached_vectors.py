"""Read cached vectors of sentence-transformers: a folder of `datasets` with texts and vectors.

After the examples of distillation in github.com/UKPLab/sentence-transformers, version 6.2: the
teacher's vectors are in the column `label`, for MSELoss, and `save_to_disk` writes the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample
from teachonce.feature_store.captures.schema import Numbers
from teachonce.feature_store.captures.tables import (
    Cells,
    TableCapture,
    TableFiles,
    first_width,
    holds_table,
    numbers,
)
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tables import is_list, is_text

LABEL = "label"
VECTOR = Numbers(LABEL, "states", ("numbers",))


def _has_vectors(table: TableFiles) -> bool:
    import pyarrow

    if LABEL not in table.columns:
        return False
    kind = table.schema.field(LABEL).type
    return is_list(kind) and bool(pyarrow.types.is_floating(kind.value_type))


def _text_columns(table: TableFiles) -> list[str]:
    return [name for name in table.columns if is_text(table.schema.field(name).type)]


class CachedVectors(TableCapture):
    """Reads a table of texts with vectors."""

    def __init__(self, options: ImportOptions, teacher: TeacherFiles) -> None:
        super().__init__(options.source, _has_vectors, f"table with a column {LABEL} of vectors")
        texts, named = _text_columns(self._table), options.text_column
        if not texts:
            raise UserError(
                f"{options.source}: has no column of strings, expected the texts whose vectors are"
                f" in {LABEL}; add one"
            )
        columns = texts if named is None else [named]
        if len(columns) != 1 or columns[0] not in texts:
            problem = (
                f"give --text-column NAME, the column whose vectors are in {LABEL}"
                if named is None
                else f"--text-column {named}: there is no such column of texts"
            )
            raise UserError(
                f"{options.source}: {problem}; its columns of texts are {', '.join(texts)}"
            )
        self._column, self._prompt = columns[0], options.prompt or ""
        self.contents = CaptureContents(vector=first_width(self._table, VECTOR))
        self.settings = {"text_column": self._column}

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for each row: its text, with its vector."""
        for where, cells in self._table.rows([self._column, LABEL]):
            text = cells[self._column].as_py()
            if text is None:
                raise UserError(f"{where}: column {self._column} has no text; remove this row")
            yield Sample(where, partial(self._rows, cells, where), text=self._prompt + text)

    def _rows(self, cells: Cells, where: str) -> Rows:
        vector = numbers(VECTOR, cells, where)
        if len(vector) != self.contents.vector:
            raise UserError(
                f"{where}: a vector of {len(vector)} numbers, expected {self.contents.vector},"
                " as in the first row that has any; remove this row"
            )
        return Rows(vector=vector)


FORMAT = Format(
    "sentence-transformers",
    partial(holds_table, _has_vectors),
    CachedVectors,
    frozenset({"text_column", "max_length", "prompt"}),
)
