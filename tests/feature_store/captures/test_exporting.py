"""A whole store as Parquet and as a folder of datasets."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
from pyarrow import parquet

from teachonce.store import open_store
from tests.feature_store.captures.conftest import run


def test_everything_is_written(store: Path, tmp_path: Path) -> None:
    texts = [record.text for record in open_store(store)]
    told = json.loads(
        run("export", store, tmp_path / "a.parquet", "--to", "parquet", "--json").stdout
    )
    assert told["rows"] == len(texts)
    assert told["bytes"] == (tmp_path / "a.parquet").stat().st_size
    assert parquet.read_table(tmp_path / "a.parquet")["text"].to_pylist() == texts
    columns = ("--columns", "text,token_ids", "--floats", "float16")
    assert run("export", store, tmp_path / "a", "--to", "datasets", *columns).exit_code == 0
    made = datasets.load_from_disk(str(tmp_path / "a"))
    assert made.column_names == ["text", "token_ids"] and made["text"][:] == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.parquet"]
