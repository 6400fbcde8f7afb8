"""Helpers of the corpus tests: write texts in every format, read them, and return refusals."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
TEXTS = ["Первая строка.", 'second, with "quotes"', "tab less", "日本語 🙂", " kept as it is "]


def texts(source: Path | str, column: str | None = None) -> list[str]:
    return [document.text for document in Corpus.open([str(source)], column)]


def refusal(source: Path | str, column: str | None = None) -> str:
    with pytest.raises(CorpusError) as caught:
        texts(source, column)
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in message
    return message


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the rows in the format of the suffix."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        cells = [list(rows[0]), *(map(str, row.values()) for row in rows)]
        lines = map("\t".join, cells) if path.suffix == ".tsv" else map(json.dumps, rows)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
