"""Independent readers, `reference_reader.py` and the short one of `examples/read_store.py`, were
written from FORMAT.md alone and read every store; tensorstore and zarrs open every array."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from teachonce.store import open_store
from teachonce.store.format.features import TASKS
from teachonce.store.read.record import Record
from tests.examples.loading import EXAMPLES, example
from tests.making.stores import features_of, make_store
from tests.store import reference_reader
from tests.store.golden.make import STORES
from tests.store.reference_reader import Store

Made = Callable[..., Any]
EXAMPLE = EXAMPLES / "read_store.py"


@pytest.mark.parametrize("reader", (EXAMPLE, Path(reference_reader.__file__)))
def test_the_readers_import_nothing_of_ours(reader: Path) -> None:
    code = f"import runpy, sys; runpy.run_path({str(reader)!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.split(".")[0] for name in run.stdout.split()}
    assert not {"teachonce", "tests", "torch", "zarr", "numcodecs", "h5py"} & found


def assert_equal(found: dict[str, Any], record: Record) -> None:
    """Compare exactly, except for float32 rounding: NumPy may multiply in another order."""
    for name in ("text", "document", "document_begin", "hard_cut"):
        assert found[name] == getattr(record, name)
    assert np.array_equal(found["id"], record.token_ids)
    assert np.array_equal(np.stack([found["begin"], found["end"]], 1), record.offsets)
    assert np.array_equal(found["special"], record.special)
    assert found.get("label", -1) == (-1 if record.label is None else record.label)
    assert found.get("context", 0) == record.context
    vector = record.embedding if record.features.embedding else None
    optional = {"learn": record.learn, "messages": record.messages, "tag": record.tags}
    for name, values in (optional | {"embedding": vector}).items():
        assert (name in found) == (values is not None), name
        assert values is None or np.array_equal(found[name], values), name
    assert len(found["views"]) == len(record.views)
    for ours, view in zip(found["views"], record.views, strict=True):
        assert np.array_equal(ours["spans"], view.spans)
        assert np.array_equal(ours["mask"], view.mask)
        for kind, stored in (("hidden", view.hidden), ("attention", view.attention)):
            assert list(ours[kind]) == list(stored)
            for name, values in ours[kind].items():
                assert values.dtype == np.float32
                assert np.allclose(values, stored[name], rtol=1e-6, atol=1e-6)
        if record.features.logits:
            for name, values in ours["logits"].items():
                assert np.allclose(values, getattr(view.logits, name), rtol=1e-6, atol=1e-6), name
        for name, logits in (("classes", "class_logits"), ("tags", "tag_logits")):
            assert name not in ours or np.array_equal(ours[name], getattr(view, logits))


LOGITS = ("topk", "sample", "head", "next-topk", "next-sample", "ranked-topk")
KINDS = (*LOGITS, *TASKS, "embedding", "chat")


@pytest.mark.parametrize(  # each codec and container of every kind, each codec in both containers
    ("ext", "codec", "kind"),
    [
        (("zarr", "h5")[(row + column) % 2], codec, kind)
        for row, kind in enumerate(KINDS)
        for column, codec in enumerate(("exact", "default", "small"))
    ],
)
def test_a_reader_written_from_the_format_alone(
    tmp_path: Path, ext: str, codec: str, kind: str
) -> None:
    path, features = tmp_path / f"a.{ext}", features_of(codec, kind)
    if kind != KINDS[0]:  # for each kind, the states and maps would be the same arrays
        features = replace(features, hidden=(), attention=())
    make_store(path, features, parts=2, sequences=4)
    reader, fs = Store(path), open_store(path)
    records = list(zip(reader, fs, strict=True))
    assert len(records) == 8
    for found, record in records:
        assert_equal(found, record)
    # Each kind of logits has an array of its own.
    logits = {"topk": "rest", "sample": "start", "head": "values"}
    logits |= {"next-topk": "observed", "next-sample": "observed", "ranked-topk": "ids"}
    assert kind not in logits or logits[kind] in records[0][0]["views"][1]["logits"]
    assert records[0][0]["views"][1]["mask"].dtype == bool
    if kind in TASKS:
        task = reader.features["task"]
        assert task["kind"] == kind and len(task["labels"]) == 4
        assert {"classification": "label", "tagging": "tag"}[kind] in records[0][0]


@pytest.mark.parametrize("name", STORES)
def test_it_reads_the_golden_stores(name: str) -> None:
    path = Path(__file__).parent / "golden" / name
    for found, record in zip(Store(path), open_store(path), strict=True):
        assert_equal(found, record)


@pytest.mark.parametrize("codec", ("exact", "default"))
@pytest.mark.parametrize("kind, most", (("next-topk", 4096), ("topk", 1), ("embedding", 4096)))
def test_the_short_reader_of_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, kind: str, most: int
) -> None:
    """The short reader also reads format version 2, with an index for more than `most` parts."""
    monkeypatch.setattr("teachonce.store.write.tree.FEW_PARTS", most)
    path = tmp_path / "a.zarr"
    make_store(path, features_of(codec, kind), parts=2, sequences=4)
    read, fs = example("read_store").read_store, open_store(path)
    pairs = list(zip(read(path), fs, strict=True))
    assert len(pairs) == 8
    for found, record in pairs:
        assert_same_arrays(found, record)


def assert_same_arrays(found: dict[str, Any], record: Record) -> None:
    """Check that the short reader returns every array of the record, up to float32 rounding."""
    spans = np.stack([found["token/begin"], found["token/end"]], 1)
    expected: dict[str, Any] = {"token/id": record.token_ids, "token/special": record.special}
    if record.features.embedding:
        expected["sequence/embedding/values"] = record.embedding[None]
    for number, view in enumerate(record.views):
        here, logits = f"view{number}", view.logits if record.features.logits else None
        for name, states in view.hidden.items():
            expected[f"{here}/hidden/{name}/values"] = states
        for name, attention in view.attention.items():
            expected[f"{here}/attention/{name}/values"] = attention.reshape(-1)
        for name in ("ids", "logprobs", "rest", "observed") if logits else ():
            if getattr(logits, name) is not None:
                expected[f"{here}/logits/{name}"] = getattr(logits, name)
        for column, name in enumerate(("begin", "end", "action") if number else ()):
            expected[f"{here}/mask/{name}"] = view.spans[:, column]
    assert found["text/utf8"] == record.text and np.array_equal(spans, record.offsets)
    assert set(found) == {*expected, "text/utf8", "token/begin", "token/end"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_short_reader_refuses_and_prints(copy: Callable[..., Path]) -> None:
    path, short = copy("zarr"), example("read_store")
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), str(path)], capture_output=True, text=True, check=True
    )
    record = open_store(path)[0]
    assert f"text/utf8 {record.text}\n" in run.stdout
    assert f"view0/logits/ids ({len(record.token_ids)}, 5)\n" in run.stdout
    words = [sys.executable, str(EXAMPLE), str(path.with_name("store.h5"))]
    refused = subprocess.run(words, capture_output=True, text=True)
    assert refused.stderr == f"{words[-1]}: not a Zarr store; give a folder STORE.zarr\n"
    root = json.loads((path / "zarr.json").read_text())
    for name, value, message in (
        ("created", "2020-01-01T00:00:00Z", "does not match its checksum"),
        ("state", "writing", "not a sealed store"),
        ("version", 3, "not a sealed store of version 1 or 2"),
    ):
        wrong = {**root, "attributes": {**root["attributes"], name: value}}
        (path / "zarr.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            next(short.read_store(path))


def arrays_of(path: Path) -> list[str]:
    return sorted(
        str(file.parent.relative_to(path))
        for file in path.rglob("zarr.json")
        if json.loads(file.read_text())["node_type"] == "array"
    )


def read_by_tensorstore(array: Path) -> Any:
    import tensorstore

    where = {"driver": "file", "path": str(array)}
    return tensorstore.open({"driver": "zarr3", "kvstore": where}).result().read().result()


def read_by_zarrs(array: Path) -> Any:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return zarr.open_array(array, mode="r")[:]


@pytest.mark.parametrize("codec", ("default", "small"))
@pytest.mark.parametrize("read", (read_by_tensorstore, read_by_zarrs))
def test_other_software_opens_every_array(
    made: Made, codec: str, read: Callable[[Path], Any]
) -> None:
    pytest.importorskip(read.__name__.rpartition("_")[2])
    path = made("zarr", codec, "topk")[0]
    names = arrays_of(path)
    assert len(names) > 80
    for name in names:
        expected = zarr.open_array(path / name, mode="r")[:]
        assert np.array_equal(read(path / name), expected), name
