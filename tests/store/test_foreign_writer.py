"""An independent writer, from FORMAT.md alone with plain zarr-python or h5py, makes stores that
`store` reads and finds sound."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.store.rewriting import write_shard

TEXTS = ("a cat", "no")
IDS = (101, 1037, 4937, 102, 101, 2053, 102)
FEATURES = {
    "views": 2,
    "max_length": 16,
    "width": 4,
    "vocabulary": 30522,
    "codec": "default",
    "hidden": ["mean"],
    "attention": ["mean"],
    "logits": {"tier": "topk", "size": 3},
    "encodings": {
        "hidden": {"encoding": "int8", "normalised": "by channel"},
        "logprobs": {"encoding": "fixed", "step": 1 / 1024, "minus_infinity": 65535},
        "rest": {"encoding": "fixed", "step": 1 / 1024, "minus_infinity": 65535},
        "head": {"encoding": "float16"},
        "attention": {"encoding": "square"},
    },
}
ROOT = {
    "format": "teachonce",
    "version": 1,
    "identity": {"teacher": "another", "corpus": "x" * 100_000},  # more than 64 KiB in HDF5
    "features": FEATURES,
    "software": {"another": "1"},
}
CREATED = "2026-01-31T12:00:00Z"


def logits_and_states() -> dict[str, Array]:
    """Return arrays of a view with any values that a teacher may give."""
    rng = np.random.default_rng(0)
    maps = np.concatenate([rng.dirichlet(np.ones(n), n).reshape(-1) for n in (4, 3)])
    logprobs = np.sort(rng.integers(2000, 9000, (7, 3)), axis=1)  # at most 0.14 each
    logprobs[2, 2] = 65535
    rest = -1024 * np.log1p(-np.exp(logprobs / -1024).sum(axis=1))
    return {
        "logits/ids": np.argsort(rng.random((7, 30522)), axis=1)[:, :3].astype(np.uint32),
        "logits/logprobs": logprobs.astype(np.uint16),
        "logits/rest": np.rint(rest).astype(np.uint16),
        "logits/log_partition": rng.normal(size=7).astype(np.float32),
        "hidden/mean/values": rng.integers(-127, 128, (7, 4)).astype(np.int8),
        "hidden/mean/scale": rng.random(7).astype(np.float16),
        "attention/mean/values": np.rint(255 * np.sqrt(maps)).astype(np.uint8),
    }


def part() -> dict[str, Array]:
    views = {f"view{i}/{name}": a for i in (0, 1) for name, a in logits_and_states().items()}
    return views | {
        "sequence/document": np.array([0, 1]),
        "sequence/document_begin": np.array([0, 0]),
        "sequence/hard_cut": np.array([False, False]),
        "sequence/text_start": np.array([0, 5, 7]),
        "sequence/token_start": np.array([0, 4, 7]),
        "text/utf8": np.frombuffer("".join(TEXTS).encode(), np.uint8),
        "token/id": np.array(IDS, np.uint32),
        "token/begin": np.array([0, 0, 2, 0, 0, 0, 0], np.int32),
        "token/end": np.array([0, 1, 5, 0, 0, 2, 0], np.int32),
        "token/special": np.array([True, False, False, True, True, False, True]),
        "view1/mask/start": np.array([0, 1, 1]),
        "view1/mask/begin": np.array([2], np.int32),
        "view1/mask/end": np.array([5], np.int32),
        "view1/mask/action": np.array([0], np.uint8),
    }


OUTSIDE: dict[str, Array] = {
    "calibration/hidden/mean/mean": np.array([1, 2, 3, 4], np.float32),
    "calibration/hidden/mean/deviation": np.array([1, 2, 1, 0.5], np.float32),
    "teacher/files/notes.txt": np.frombuffer(b"written by hand", np.uint8),
}


def entry(values: Array) -> dict[str, Any]:
    sha256 = hashlib.sha256(values.tobytes()).hexdigest()
    return {"shape": list(values.shape), "dtype": values.dtype.name, "sha256": sha256}


class ZarrTree:
    def __init__(self, path: Path) -> None:
        self.path, self.root = path, zarr.create_group(path, zarr_format=3)

    def group(self, name: str) -> None:
        self.root.create_group(name)

    def array(self, name: str, values: Array) -> None:
        write_shard(self.path, name, values, values.shape)

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        (self.root[group] if group else self.root).attrs.update(values)

    def close(self) -> None:
        pass


class Hdf5Tree:
    def __init__(self, path: Path) -> None:
        self.path, self.root = path, h5py.File(path, "w", libver=("v110", "v110"))

    def group(self, name: str) -> None:
        self.root.create_group(name)

    def array(self, name: str, values: Array) -> None:
        settings = {"chunks": values.shape, "fletcher32": True, "track_times": False}
        self.root.create_dataset(name, data=values, **settings)

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            fixed = np.int64(value) if isinstance(value, int) else np.bytes_(text.encode("ascii"))
            self.root[group or "/"].attrs.create(key, fixed)

    def close(self) -> None:
        self.root.close()
        data = self.path.read_bytes()
        self.path.write_bytes(data + hashlib.sha256(data).digest())


def write(tree: ZarrTree | Hdf5Tree) -> None:
    arrays = {name: entry(values) for name, values in OUTSIDE.items()}
    counts = {"sequences": 2, "tokens": 7, "squares": 25, "text_bytes": 7} | {
        "spans": [0, 1], "draws": [0, 0],
    }  # fmt: skip
    entries = {name: entry(values) for name, values in part().items()}
    listed = {"part": 4, "counts": counts, "arrays": entries}
    groups = {
        name.rsplit("/", depth)[0]
        for name in [*OUTSIDE, *(f"parts/4/{name}" for name in entries)]
        for depth in range(1, name.count("/") + 1)
    }
    for group in sorted(groups):
        tree.group(group)
    for name, values in (OUTSIDE | {f"parts/4/{n}": v for n, v in part().items()}).items():
        tree.array(name, values)
    tree.attributes("parts/4", {"part": listed})
    lengths = base64.b64encode(bytes([4, 3])).decode()
    manifest = {"attributes": ROOT, "arrays": arrays, "parts": [listed], "lengths": lengths}
    data = json.dumps(manifest).encode("ascii")
    tree.array("manifest", np.frombuffer(data, np.uint8))
    checksum = hashlib.sha256(data + CREATED.encode()).hexdigest()
    sealed = {"state": "sealed", "created": CREATED, "arrays": arrays, "checksum": checksum}
    tree.attributes("", ROOT | sealed)
    tree.close()


@pytest.mark.parametrize("ext, tree", (("zarr", ZarrTree), ("h5", Hdf5Tree)))
def test_a_writer_written_from_the_format_alone(tmp_path: Path, ext: str, tree: Any) -> None:
    path = tmp_path / f"a.{ext}"
    write(tree(path))
    assert verify(path).problems == []
    fs, given = open_store(path), logits_and_states()
    assert [record.text for record in fs] == list(TEXTS)
    assert fs[0].token_ids.tolist() == list(IDS[:4])
    view = fs[0].views[1]
    assert view.spans.tolist() == [[2, 5, 0]] and view.mask.tolist() == [False, False, True, False]
    z = given["hidden/mean/values"] * given["hidden/mean/scale"].astype(np.float32)[:, None]
    states = z[:4] * np.array([1, 2, 1, 0.5]) + np.array([1, 2, 3, 4])
    assert np.allclose(view.hidden["mean"], states, atol=1e-5)
    logprobs = -given["logits/logprobs"][:4].astype(float) / 1024
    logprobs[2, 2] = -np.inf
    assert np.allclose(view.logits.logprobs, logprobs)
    attention = (given["attention/mean/values"][16:].reshape(3, 3) / 255) ** 2
    assert np.allclose(fs[1].views[0].attention["mean"], attention)
    assert len(list(fs.stream())) == 1 and fs.teacher_file("notes.txt") == b"written by hand"
