"""A whole store as Parquet and as a folder of datasets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from pyarrow import parquet

from teachonce.feature_store.captures import exporting
from teachonce.feature_store.captures.exporting import export_store
from teachonce.store import LogitsSpec, StoreError, open_store
from teachonce.store.read.derived_copies import list_of
from teachonce.support.errors import UserError
from tests.feature_store.captures.conftest import run
from tests.making.captures import packed
from tests.making.stores import begin, features_of, make_part, put_part


def test_everything_is_written(store: Path, tmp_path: Path) -> None:
    texts = [record.text for record in open_store(store)]
    printed = json.loads(
        run("export", store, tmp_path / "a.parquet", "--to", "parquet", "--json").stdout
    )
    assert printed["rows"] == len(texts)
    assert printed["bytes"] == (tmp_path / "a.parquet").stat().st_size
    assert parquet.read_table(tmp_path / "a.parquet")["text"].to_pylist() == texts
    columns = ("--columns", "text,token_ids", "--floats", "float16")
    assert run("export", store, tmp_path / "a", "--to", "datasets", *columns).exit_code == 0
    made = datasets.load_from_disk(str(tmp_path / "a"))
    assert made.column_names == ["text", "token_ids"] and made["text"][:] == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.parquet"]


def test_distillkit_files_have_all_rows_of_a_sound_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have ROWS_A_FILE rows; a store with logits in the wrong parts is refused."""
    monkeypatch.setattr(exporting, "ROWS_A_FILE", 5)
    path, made = tmp_path / "a.zarr", tmp_path / "made"
    features = replace(
        features_of(views=1), hidden=(), attention=(), logits=LogitsSpec("topk", 5, next_token=True)
    )
    writer = begin(path, features)
    parts = [make_part(features, 0) for _ in range(2)]  # of equal shapes
    parts[1].logits[0]["ids"] = (parts[1].logits[0]["ids"] + 1) % features.vocabulary
    for number, part in enumerate(parts):
        put_part(writer, number, part)
    writer.seal()
    export_store(str(path), made, "distillkit", None, "float32")
    found = [parquet.read_table(made / f"data_{n}.parquet").to_pylist() for n in range(5)]
    assert [len(rows) for rows in found] == [5, 5, 5, 5, 4] and len([*made.iterdir()]) == 6
    for record, row in zip(open_store(path), sum(found, []), strict=True):
        logits = record.views[0].logits
        assert row["input_ids"] == record.token_ids.tolist()
        assert row["bytepacked_indices"] == packed(logits.ids, bits=10)
        logprobs = np.array(row["compressed_logprobs"], np.uint8).view("<f4")
        assert np.array_equal(logprobs, logits.logprobs)
    with monkeypatch.context() as small:
        small.setattr(exporting, "LARGEST", 99)
        with pytest.raises(UserError, match=r"at most 99 bytes; export --to parquet, or"):
            export_store(str(path), tmp_path / "large", "distillkit", None, "float32")

    chunks = [path / f"parts/{number}/view0/logits/ids/c/0/0" for number in range(2)]
    contents = [chunk.read_bytes() for chunk in chunks]
    for chunk, content in zip(chunks, reversed(contents), strict=True):
        chunk.write_bytes(content)
    monkeypatch.setattr(exporting, "ROWS_A_FILE", 8)  # the last file is full before the stream ends
    with pytest.raises(StoreError, match="view0/logits/ids"):
        export_store(str(path), tmp_path / "b", "distillkit", None, "float32")
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == [list_of(path).name, "a.zarr", "made"]
