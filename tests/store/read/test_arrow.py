"""A store as a table: Arrow batches, Parquet files and datasets equal its records."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from teachonce.store import FeatureStore, StoreError, open_store
from teachonce.store.read import arrow, table_files
from teachonce.store.read.record import Record
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.making.stores import Made, begin, features_of, make_part, put_part

PLAIN = ("index", "document", "document_begin", "hard_cut", "text")
CASES = [
    ("zarr", "default", "topk"), ("h5", "default", "sample"), ("zarr", "small", "head"),
    ("zarr", "default", "classification"), ("zarr", "exact", "tagging"),
    ("h5", "default", "pairs"), ("zarr", "default", "embedding"),
    ("h5", "small", "next-topk"), ("zarr", "small", "chat"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "BATCH_BYTES", 1)


def wanted(record: Record, column: str) -> Any:
    """Return the expected value of a column for a record."""
    view = record.views[0]
    if column.startswith("view"):
        number, _, column = column.removeprefix("view").partition("_")
        view = record.views[int(number)]
    kind, _, name = column.partition("_")
    spans = {"begin": 0, "end": 1, "action": 2, "role": 2}
    if kind in ("masked", "message"):
        of_kind: Any = view.spans if kind == "masked" else record.messages
        return of_kind[:, spans[name]]
    if kind in ("hidden", "attention"):
        return getattr(view, kind)[name]
    if column in ("class_logits", "tag_logits"):
        return getattr(view, column)
    if kind == "logits":
        values = getattr(view.logits, name)
        if name in ("ids", "counts") and view.logits.tier == "sample":
            return np.split(values, view.logits.start[1:-1])
        return values
    if column in ("text_a", "text_b"):
        return record.texts[column == "text_b"]
    if column in ("begin", "end"):
        return record.offsets[:, spans[column]]
    return getattr(record, column)


def assert_same(cell: Any, value: Any, tolerance: float = 0.0) -> None:
    if isinstance(value, list):
        assert [len(row) for row in cell] == [len(row) for row in value]
        cell, value = (np.concatenate([np.array(r) for r in rows]) for rows in (cell, value))
    if isinstance(value, str | None):
        assert cell == value
    else:
        np.testing.assert_allclose(np.array(cell), np.array(value), rtol=tolerance, atol=tolerance)


def assert_rows(rows: list[dict[str, Any]], store: FeatureStore, tolerance: float = 0.0) -> None:
    assert len(rows) == len(store) == 36
    for number in (0, 11, 12, 19, 35):
        for column, cell in rows[number].items():
            assert_same(cell, wanted(store[number], column), tolerance)


@pytest.mark.parametrize(("ext", "codec", "tier"), CASES)
def test_the_table_holds_what_the_records_hold(made: Made, ext: str, codec: str, tier: str) -> None:
    store = open_store(made(ext, codec, tier)[0])
    table = store.table()
    batches = list(table.batches())
    assert len(batches) > 2 and all(batch.schema.equals(table.schema) for batch in batches)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert_rows(rows, store)
    expected = {"hidden_mean", "view1_hidden_groups2.1", "attention_mean", "view1_masked_action"}
    own = {"classification": "class_logits", "pairs": "text_b", "tagging": "view1_tag_logits",
           "embedding": "embedding", "head": "logits_values",
           "next-topk": "logits_observed", "chat": "message_role"}  # fmt: skip
    assert {*PLAIN, *expected, own.get(tier, "view1_logits_ids")} <= set(rows[0])
    assert all(field.metadata[b"description"] for field in table.schema)
    if tier == "classification":
        assert {row["label"] for row in rows} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize(
    "blocks", ([[0, 2], [5, 7]], [[5, 7], [0, 2]], [[3, 4], [11, 12], [12, 15]])
)
def test_blocks_apart_in_one_batch(tmp_path: Path, blocks: list[list[int]]) -> None:
    features = dataclasses.replace(features_of(tier=None, views=1), hidden=(), attention=())
    writer = begin(tmp_path / "a.zarr", features)
    for number in range(2):
        part = make_part(features, number)
        part.document_begin, part.hard_cut = np.arange(12) + 12 * number, np.arange(12) % 3 == 0
        put_part(writer, number, part)
    writer.seal()
    store = open_store(tmp_path / "a.zarr")
    (batch,) = store.table(["index", "document_begin", "hard_cut"]).batches(np.array(blocks))
    rows = [row for first, end in blocks for row in range(first, end)]
    assert batch.to_pydict() == {
        "index": rows,
        "document_begin": rows,
        "hard_cut": [row % 3 == 0 for row in rows],
    }


def test_parquet_in_one_file_and_in_several(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(made("zarr")[0])
    seen: list[int] = []
    monkeypatch.setattr(table_files, "ROW_GROUP_BYTES", 1)
    one = store.to_parquet(tmp_path / "one.parquet", on_rows=seen.append)
    assert one == [tmp_path / "one.parquet"] and sum(seen) == 36 and len(seen) > 2
    file = pq.ParquetFile(one[0])
    assert file.num_row_groups == len(seen)
    assert_rows(file.read().to_pylist(), store)
    about = json.loads(file.schema_arrow.metadata[b"teachonce"])
    assert about["content"] == store.manifest.content() and about["floats"] == "float32"
    assert about["features"] == store.meta["features"] and about["identity"] == store.identity

    several = store.to_parquet(tmp_path / "folder", file_bytes=1, columns=["text", "hidden_mean"])
    assert [path.name for path in several] == [f"{n:05}.parquet" for n in range(len(seen))]
    assert sorted(tmp_path.rglob("*.parquet")) == sorted([*one, *several])  # nothing else remains
    rows = [row for path in several for row in pq.read_table(path).to_pylist()]
    assert list(rows[0]) == ["text", "hidden_mean"]
    assert_rows(rows, store)


def test_the_bytes_of_a_batch_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Rows(list[Any]):  # one batch
        counted = 0

        @property
        def nbytes(self) -> int:
            Rows.counted += 1
            return 8

    def joined(group: list[Rows]) -> Any:
        return pa.table({"index": [row for rows in group for row in rows]})

    own_table = SimpleNamespace(from_batches=joined)
    monkeypatch.setattr(table_files, "pa", SimpleNamespace(Table=own_table))
    schema, batches = pa.schema([("index", pa.int64())]), (Rows([number]) for number in range(50))
    table: Any = SimpleNamespace(schema=schema, batches=lambda: batches)
    table_files.write_parquet(table, tmp_path / "a.parquet", 2**29, lambda rows: None)
    assert pq.read_table(tmp_path / "a.parquet")["index"].to_pylist() == [*range(50)]
    assert Rows.counted == 50


def test_float16(made: Made, tmp_path: Path) -> None:
    store = open_store(made("zarr")[0])
    names = ["hidden_mean", "attention_mean", "logits_logprobs"]
    path = store.to_parquet(tmp_path / "a.parquet", columns=names, floats="float16")[0]
    found = pq.read_table(path)
    assert str(found.schema.field("hidden_mean").type).count("halffloat")
    assert_rows(found.to_pylist(), store, 2e-3)
    batch = next(store.stream(features=["hidden"], batch_tokens=10**6))
    large = arrow.Column("x", "token", "float16", "", lambda _: batch.hidden["mean"].states() * 1e6)
    with pytest.raises(StoreError, match="column x: has numbers that float16 cannot hold; use f"):
        large.cells(batch)


def by_library(name: str, folder: Path) -> list[dict[str, Any]]:
    """Read a folder of Parquet files with a library for tables; return its rows."""
    library = pytest.importorskip(name)
    if name == "pandas":
        return list(library.read_parquet(folder).to_dict("records"))
    if name == "polars":
        return list(library.read_parquet(folder / "*.parquet").to_dicts())
    found = library.sql(f"from '{folder}/*.parquet' order by index")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


@pytest.mark.parametrize("floats", ["float32", "float16"])
@pytest.mark.parametrize("name", ["pandas", "polars", "duckdb"])
def test_libraries_of_tables_read_the_files(
    made: Made, tmp_path: Path, name: str, floats: str
) -> None:
    store = open_store(made("zarr")[0])
    columns = ["index", "text", "token_ids", "hidden_mean", "logits_logprobs"]
    store.to_parquet(tmp_path / "rows", columns=columns, floats=floats, file_bytes=1)
    rows = by_library(name, tmp_path / "rows")
    assert list(rows[0]) == columns
    plain = [{k: v if isinstance(v, str | int) else [*v] for k, v in row.items()} for row in rows]
    assert_rows(plain, store, 2e-3 if floats == "float16" else 0)


def test_a_dataset_and_its_stream(made: Made, tmp_path: Path) -> None:
    store = open_store(made("zarr")[0])
    dataset = store.to_datasets(cache_dir=tmp_path)
    assert_rows(list(dataset), store)
    states: Array = dataset.with_format("numpy")[7]["hidden_mean"]
    np.testing.assert_array_equal(states, store[7].views[0].hidden["mean"])
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.arrow")}
    columns = ["token_ids", "view1_masked_begin"]
    assert store.to_datasets(cache_dir=tmp_path).column_names == dataset.column_names
    assert store.to_datasets(cache_dir=tmp_path, columns=columns).column_names == columns
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.arrow")}
    assert len(written) == 1 and len(again) == 2 and written.items() <= again.items()
    streamed = store.to_datasets(columns=columns, streaming=True)
    assert_rows(list(streamed), store)
    halves = [list(streamed.shard(streamed.num_shards, n)) for n in range(streamed.num_shards)]
    assert len(halves) > 2 and sorted(len(rows) for rows in halves)[0] > 0


def test_what_cannot_be_a_table_is_refused(
    made: Made, copy: Callable[..., Path], tmp_path: Path
) -> None:
    store = open_store(made("zarr")[0])
    printed = "no column 'hidden'; did you mean hidden_mean[?] it has index, document, .*_mean"
    with pytest.raises(StoreError, match=printed):
        store.to_datasets(columns="hidden")
    with pytest.raises(StoreError, match="expected at least one, and each once, got text, text"):
        store.to_parquet(tmp_path / "a", columns=["text", "text"])
    with pytest.raises(StoreError, match="cache_dir rows: a streamed dataset writes no file"):
        store.to_datasets(streaming=True, cache_dir="rows")
    with pytest.raises(StoreError, match="floats: expected float32 or float16, got 'int8'"):
        store.table(floats="int8")
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreError, match="there: exists already; remove it, or choose another"):
        store.to_parquet(tmp_path / "there")
    for write in (store.to_parquet, lambda url: store.to_datasets(cache_dir=url)):
        with pytest.raises(UserError, match="s3://bucket/rows: is a URL, expected a path on this"):
            write("s3://bucket/rows")
    damaged = copy("zarr")
    shard = damaged / "parts/2/view0/hidden/mean/scale/c/0"
    shard.write_bytes(shard.read_bytes()[:-60] + bytes(60))
    for path in (tmp_path / "folder", tmp_path / "a.parquet"):
        with pytest.raises(StoreError, match="parts?.2.*feature-store verify"):
            open_store(damaged).to_parquet(path)
    with pytest.raises(StoreError, match="parts?.2"):
        open_store(damaged).to_datasets(cache_dir=tmp_path / "cache")
    assert not [*tmp_path.glob("*folder*"), *tmp_path.glob("*.parquet"), *tmp_path.rglob("*.arrow")]
