"""Readers that know nothing of this software: one written from FORMAT.md alone, with plain
zarr-python or h5py; tensorstore and zarrs open every array."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers filter 32001
import numpy as np
import pytest
import zarr

from store import open_store

Made = Callable[..., Any]


class Foreign:
    """About sixty lines from FORMAT.md; imports nothing of `store`."""

    def __init__(self, path: Path) -> None:
        h5 = path.suffix == ".h5"
        if h5:
            data = path.read_bytes()
            assert hashlib.sha256(data[:-32]).digest() == data[-32:]
        self.root: Any = h5py.File(path, "r") if h5 else zarr.open_group(path, mode="r")
        self.attributes = dict(self.root.attrs)
        if h5:
            texts = {k: v.decode() for k, v in self.attributes.items() if isinstance(v, bytes)}
            objects = {k: json.loads(v) for k, v in texts.items() if v.startswith("{")}
            self.attributes |= texts | objects
        assert self.attributes["format"] == "teachonce" and self.attributes["version"] == 1
        assert self.attributes["state"] == "sealed"
        manifest = self.root["manifest"][:].tobytes()
        sealed = hashlib.sha256(manifest + self.attributes["created"].encode()).hexdigest()
        assert sealed == self.attributes["checksum"]
        self.manifest = json.loads(manifest)
        self.features = self.attributes["features"]

    def check(self) -> None:
        for part in [None, *self.manifest["parts"]]:
            listed = part["arrays"] if part else self.manifest["arrays"]
            for name, entry in listed.items():
                array = self.root[f"parts/{part['part']}/{name}" if part else name][:]
                assert [*array.shape] == entry["shape"] and array.dtype.name == entry["dtype"]
                assert hashlib.sha256(array.tobytes()).hexdigest() == entry["sha256"], name

    def sequences(self) -> Iterator[dict[str, Any]]:
        for part in self.manifest["parts"]:
            p = self.root[f"parts/{part['part']}"]
            tokens, text = p["sequence/token_start"][:], p["sequence/text_start"][:]
            squares = np.concatenate([[0], np.cumsum(np.diff(tokens) ** 2)])
            for s in range(part["counts"]["sequences"]):
                a, b = int(tokens[s]), int(tokens[s + 1])
                views = [p[f"view{i}"] for i in range(self.features["views"])]
                yield {
                    "text": bytes(p["text/utf8"][int(text[s]) : int(text[s + 1])]).decode(),
                    "ids": p["token/id"][a:b],
                    "offsets": np.stack([p["token/begin"][a:b], p["token/end"][a:b]], axis=1),
                    "hidden": [self.hidden(v, "mean", a, b) for v in views],
                    "logprobs": [self.logs(v["logits/logprobs"][a:b]) for v in views],
                    "rest": [self.logs(v["logits/rest"][a:b]) for v in views],
                    "attention": [
                        self.probabilities(
                            v["attention/mean/values"][int(squares[s]) : int(squares[s + 1])]
                        ).reshape(b - a, b - a)
                        for v in views
                    ],
                }

    def hidden(self, view: Any, name: str, a: int, b: int) -> np.ndarray:
        values = view[f"hidden/{name}/values"][a:b]
        if self.features["encodings"]["hidden"]["encoding"] == "float32":
            return values
        scale = view[f"hidden/{name}/scale"][a:b].astype(np.float32)
        if values.dtype == np.int8:
            z = values * scale[:, None]
        else:
            nibbles = np.stack([values & 15, values >> 4], axis=2).reshape(len(values), -1)
            codes = (nibbles[:, : self.features["width"]].astype(int) ^ 8) - 8
            group = self.features["encodings"]["hidden"]["group"]
            z = codes * scale[:, np.arange(codes.shape[1]) // group]
        here = self.root[f"calibration/hidden/{name}"]
        return z * here["deviation"][:] + here["mean"][:]

    def logs(self, codes: np.ndarray) -> np.ndarray:
        if codes.dtype == np.float32:
            return codes
        if codes.dtype == np.uint16:
            return np.where(codes == 65535, -np.inf, -codes.astype(float) / 1024)
        return np.where(codes == 255, -np.inf, -((codes / 32) ** 2))

    def probabilities(self, codes: np.ndarray) -> np.ndarray:
        return codes if codes.dtype == np.float32 else (codes / 255) ** 2


@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("codec", ("exact", "default", "small"))
def test_a_reader_written_from_the_format_alone(made: Made, ext: str, codec: str) -> None:
    path = made(ext, codec, "topk")[0]
    foreign, fs = Foreign(path), open_store(path)
    foreign.check()
    pairs = list(zip(fs, islice(foreign.sequences(), 14), strict=False))
    assert len(pairs) == 14
    for record, found in pairs:
        assert found["text"] == record.text
        assert (found["ids"] == record.token_ids).all()
        assert (found["offsets"] == record.offsets).all()
        for i, view in enumerate(record.views):
            assert np.allclose(found["hidden"][i], view.hidden["mean"], atol=1e-4)
            assert np.allclose(found["logprobs"][i], view.logits.logprobs, atol=1e-6)
            assert np.allclose(found["rest"][i], view.logits.rest, atol=1e-6)
            assert np.allclose(found["attention"][i], view.attention["mean"], atol=1e-6)


@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("kind", ("classification", "tagging"))
def test_a_task_read_from_the_format_alone(made: Made, ext: str, kind: str) -> None:
    path = made(ext, "default", kind)[0]
    foreign, fs = Foreign(path), open_store(path)
    foreign.check()
    assert foreign.features["task"]["kind"] == kind
    assert len(foreign.features["task"]["labels"]) == 4
    part = foreign.root["parts/0"]
    if kind == "classification":
        labels = [-1 if record.label is None else record.label for record in fs]
        assert part["sequence/label"][:].tolist() == labels[:12]
        logits = [record.views[1].class_logits for record in fs]
        assert (part["view1/classes/values"][:] == logits[:12]).all()
    else:
        begin, end = part["sequence/token_start"][3:5]
        assert (part["token/tag"][int(begin) : int(end)] == fs[3].tags).all()
        found = part["view1/tags/values"][int(begin) : int(end)]
        assert (found == fs[3].views[1].tag_logits).all()


def arrays_of(path: Path) -> list[str]:
    return sorted(
        str(file.parent.relative_to(path))
        for file in path.rglob("zarr.json")
        if json.loads(file.read_text())["node_type"] == "array"
    )


@pytest.mark.parametrize("codec", ("default", "small"))
def test_tensorstore_opens_every_array(made: Made, codec: str) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    path = made("zarr", codec, "topk")[0]
    names = arrays_of(path)
    assert len(names) > 80
    for name in names:
        where = {"driver": "file", "path": str(path / name)}
        opened = tensorstore.open({"driver": "zarr3", "kvstore": where}).result()
        expected = zarr.open_array(path / name, mode="r")[:]
        assert np.array_equal(opened.read().result(), expected), name


@pytest.mark.parametrize("codec", ("default", "small"))
def test_zarrs_opens_every_array(made: Made, codec: str) -> None:
    pytest.importorskip("zarrs")
    path = made("zarr", codec, "topk")[0]
    for name in arrays_of(path):
        expected = zarr.open_array(path / name, mode="r")[:]
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            assert np.array_equal(zarr.open_array(path / name, mode="r")[:], expected), name


def test_the_same_checksums_in_both_formats(made: Made) -> None:
    zarr_store, h5_store = (Foreign(made(ext)[0]).manifest for ext in ("zarr", "h5"))
    for part in [*zarr_store["parts"], zarr_store]:
        for entry in part["arrays"].values():
            entry.pop("zarr_json")
    assert zarr_store == h5_store
