"""Read captures of vLLM and SGLang: Parquet that examples/capture_vllm.py and capture_sglang.py
write.

A row is a text: `input_ids` [T], and for each of the first T-1 tokens the best ids of the next
token, their log-probabilities, and the log-probability of the actual next token. The metadata of
the schema name the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample, same_length
from teachonce.feature_store.captures.schema import Numbers, checked
from teachonce.feature_store.captures.tables import Table, first_width, numbers, open_table
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

IDS = Numbers("input_ids", "ids", ("tokens of the text",))
BEST = Numbers("token_ids", "ids", ("tokens", "top-k ids"))
LOGPROBS = Numbers("logprobs", "logs", ("tokens", "top-k ids"))
OBSERVED = Numbers("observed", "logs", ("tokens",))
FIELDS = (IDS, BEST, LOGPROBS, OBSERVED)
NAMES = [field.name for field in FIELDS]


def _engine(table: Table | None) -> str | None:
    """Return the engine that the metadata of a table name; None for other tables."""
    if table is None or not set(NAMES) <= set(table.columns):
        return None
    # Captures of both engines have the same columns.
    return str((table.schema.metadata or {}).get(b"engine", b"").decode("utf-8", "replace"))


class EngineRows:
    """Reads a capture of an inference engine."""

    def __init__(self, engine: str, options: ImportOptions, teacher: TeacherFiles) -> None:
        table = open_table(options.source)
        if table is None or _engine(table) != engine:
            columns = ", ".join(table.columns) if table else "none"
            raise UserError(
                f"{options.source}: no Parquet with the columns {', '.join(NAMES)} and the metadata"
                f" engine={engine}; its columns are {columns}: check the path and --format, or"
                f" capture with examples/capture_{engine}.py"
            )
        self._table: Table = table
        self._size = first_width(table, BEST)
        self.contents = CaptureContents(
            topk=self._size, observed=True, vocabulary=teacher.vocabulary
        )
        self.settings: dict[str, Any] = {}

    def files(self) -> list[Path]:
        """Return the files of the table."""
        return list(self._table.files)

    def samples(self) -> Iterator[Sample]:
        """Yield the text of each row, without the last token, which has no logits."""
        for where, cells in self._table.rows(NAMES):
            ids = numbers(IDS, cells[IDS.name], where)
            yield Sample(where, partial(self._rows, ids, cells, where), ids[:-1])

    def _rows(self, ids: Array, cells: dict[str, Any], where: str) -> Rows:
        found = {field.name: numbers(field, cells[field.name], where) for field in FIELDS}
        found = checked(FIELDS, found, where)
        same_length(ids[1:], len(found[BEST.name]), "logits (of all tokens but the last)", where)
        if (width := found[BEST.name].shape[1]) != self._size:
            raise UserError(
                f"{where}: has {width:,} ids for a token, and the first row {self._size:,}; remove"
                " this row"
            )
        topk = found[BEST.name], found[LOGPROBS.name]
        return Rows(topk=topk, observed=found[OBSERVED.name])


def _format(engine: str) -> Format:
    def recognises(path: Path) -> bool:
        return _engine(open_table(path)) == engine

    return Format(engine, recognises, partial(EngineRows, engine), frozenset({"model"}))


VLLM, SGLANG = _format("vllm"), _format("sglang")
