"""Read captures of vLLM and SGLang: Parquet that examples/capture_vllm.py and capture_sglang.py
write.

A row is a text: `input_ids` [T], and for each of the first T-1 tokens the best ids of the next
token, their log-probabilities, and the log-probability of the actual next token. The metadata of
the schema name the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample, same_length
from teachonce.feature_store.captures.schema import Numbers
from teachonce.feature_store.captures.tables import (
    Cells,
    TableCapture,
    TableFiles,
    first_width,
    holds_table,
    numbers,
    row_arrays,
)
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

IDS = Numbers("input_ids", "ids", ("tokens of the text",))
BEST = Numbers("token_ids", "ids", ("tokens", "top-k ids"))
LOGPROBS = Numbers("logprobs", "logs", ("tokens", "top-k ids"))
OBSERVED = Numbers("observed", "logs", ("tokens",))
FIELDS = (IDS, BEST, LOGPROBS, OBSERVED)
NAMES = [field.name for field in FIELDS]


def _engine_of(schema: Any) -> str:
    """Return the name of the engine in a schema's metadata; "none" if they have none."""
    engine: bytes = (schema.metadata or {}).get(b"engine", b"none")
    return engine.decode(errors="replace")


def _is_of(engine: str, table: TableFiles) -> bool:
    """Return whether a table has the columns of FIELDS, and its metadata name the engine."""
    # Captures of both engines have the same columns.
    return set(NAMES) <= set(table.columns) and _engine_of(table.schema) == engine


class EngineRows(TableCapture):
    """Reads a capture of an inference engine: Parquet as `examples/capture_{engine}.py` writes."""

    def __init__(self, engine: str, options: ImportOptions, teacher: TeacherFiles) -> None:
        expected = (
            f"Parquet with the columns {', '.join(NAMES)} and the metadata engine={engine}, as"
            f" examples/capture_{engine}.py writes"
        )
        super().__init__(options.source, partial(_is_of, engine), expected)
        for file, schema in zip(self._table.files, self._table.schemas, strict=True):
            if (other := _engine_of(schema)) != engine:
                raise UserError(
                    f"{file}: its metadata have engine={other}, but {self._table.files[0]} has"
                    f" engine={engine}; put the files of each engine into their own folder, and"
                    " import each folder"
                )
        self._size = first_width(self._table, BEST)
        self.contents = CaptureContents(
            topk=self._size, observed=True, vocabulary=teacher.vocabulary
        )

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for each row, without its last token, which has no logits."""
        for where, cells in self._table.rows(NAMES):
            ids = numbers(IDS, cells, where)
            yield Sample(where, partial(self._rows, ids, cells, where), ids[:-1])

    def _rows(self, ids: Array, cells: Cells, where: str) -> Rows:
        arrays = row_arrays(FIELDS, cells, where)
        same_length(ids[1:], len(arrays[BEST.name]), "logits (of all tokens but the last)", where)
        if (width := arrays[BEST.name].shape[1]) != self._size:
            raise UserError(
                f"{where}: has {width:,} ids for a token, and the first row {self._size:,}; remove"
                " this row"
            )
        topk = arrays[BEST.name], arrays[LOGPROBS.name]
        return Rows(topk=topk, observed=arrays[OBSERVED.name])


def _format(engine: str) -> Format:
    fits, opened = partial(_is_of, engine), partial(EngineRows, engine)
    return Format(engine, partial(holds_table, fits), opened, frozenset({"model"}))


VLLM, SGLANG = _format("vllm"), _format("sglang")
