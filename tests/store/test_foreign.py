"""Other software and other releases read and write the same stores.

- Independent readers, `reference_reader.py` and the short one of `examples/read_store.py`, were
  written from FORMAT.md alone and read every store; tensorstore and zarrs open every array.
- An independent writer, from FORMAT.md alone with plain zarr-python or h5py, makes stores that
  `store` reads and finds sound.
- Any store that conforms to FORMAT.md is sound: chunks, shards and compressors may come from any
  writer, other software and other releases of zarr included.
- Stores from early releases of format version 1 must read the same for ever.
  They were made once, with `python -m tests.store.golden.make FOLDER`, and committed with the
  values read from them. If this test fails, the reader is wrong: never regenerate the stores to
  make it pass. A later format version gets additional stores.
"""

import base64
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from teachonce.store import Features, open_store
from teachonce.store.format.features import TASKS
from teachonce.store.read.record import Record
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.examples.loading import EXAMPLES, example
from tests.integrity.damage import problems
from tests.making.environment import printed_by
from tests.making.stores import Copy, Made, features_of, make_store
from tests.store import reference_reader
from tests.store.golden.make import STORES, values_of
from tests.store.reference_reader import Store
from tests.store.rewriting import rewrite_h5, rewrite_zarr, write_shard

EXAMPLE = EXAMPLES / "read_store.py"


@pytest.mark.parametrize("reader", (EXAMPLE, Path(reference_reader.__file__)))
def test_the_readers_import_nothing_of_ours(reader: Path) -> None:
    code = f"import runpy, sys; runpy.run_path({str(reader)!r}); print(*sys.modules)"
    found = {name.split(".")[0] for name in printed_by(sys.executable, "-c", code).split()}
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
    printed, record = printed_by(sys.executable, EXAMPLE, path), open_store(path)[0]
    assert f"text/utf8 {record.text}\n" in printed
    assert f"view0/logits/ids ({len(record.token_ids)}, 5)\n" in printed
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


GOLDEN = Path(__file__).parent / "golden"
OTHER = os.environ.get("TEACHONCE_OTHER_ZARR")  # a Python with another release of zarr
REWRITE = {"zarr": rewrite_zarr, "h5": rewrite_h5}
SEEDS = int(os.environ.get("TEACHONCE_SEEDS", "1"))


def small(codec: str = "default", tier: str = "topk") -> Features:
    return dataclasses.replace(features_of(codec, tier), hidden=("mean",))


def assert_sound(path: Path, before: Path) -> None:
    assert verify(path).problems == []
    fs, expected = open_store(path), open_store(before)
    assert fs.manifest.content() == expected.manifest.content()
    for found, batch in zip(fs.stream(seed=3), expected.stream(seed=3), strict=True):
        assert np.array_equal(found.index, batch.index)
        assert np.array_equal(found.token_ids, batch.token_ids)
        for name in batch.hidden:
            assert np.array_equal(found.hidden[name].values, batch.hidden[name].values)
    for index in (0, len(fs) - 1):
        view = fs[index].views[1]
        assert fs[index].text == expected[index].text
        other = expected[index].views[1]
        assert np.array_equal(view.logits.log_partition, other.logits.log_partition)
        assert np.array_equal(view.attention["mean"], other.attention["mean"])


@pytest.mark.slow
@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize(
    "codec, tier", (("exact", "sample"), ("default", "topk"), ("small", "head"))
)
def test_other_chunks_and_compressors_are_no_damage(
    tmp_path: Path, ext: str, codec: str, tier: str
) -> None:
    before = tmp_path / f"before.{ext}"
    make_store(before, small(codec, tier), parts=2, sequences=6)
    for seed in range(SEEDS):
        path = tmp_path / f"{seed}.{ext}"
        (shutil.copytree if before.is_dir() else shutil.copy)(before, path)
        REWRITE[ext](path, seed)
        assert_sound(path, before)


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small Zarr store without a checksum of any zarr.json."""
    path: Path = tmp_path_factory.mktemp("rewritten") / "a.zarr"
    make_store(path, small(), parts=1)
    rewrite_zarr(path)
    assert problems(path) == []
    return path


UNLAWFUL: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "attributes": lambda node, sharding: node["attributes"].update(a=1),
    "fill value": lambda node, sharding: node.update(fill_value=1),
    "keys": lambda node, sharding: node.update(more=1),
    "dimension names": lambda node, sharding: node.update(dimension_names=["x"]),
    "chunk keys": lambda node, sharding: node["chunk_key_encoding"].update(more=1),
    "other codecs": lambda node, sharding: sharding["codecs"].pop(),
    "more than one shard": lambda node, sharding: (
        sharding.update(chunk_shape=[2]),
        node["chunk_grid"]["configuration"].update(chunk_shape=[2]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNLAWFUL)
@pytest.mark.parametrize("name", ("manifest", "parts/0/text/utf8"))
def test_what_the_format_does_not_allow_is_found(rewritten: Path, what: str, name: str) -> None:
    file = rewritten / name / "zarr.json"
    before = file.read_text()
    node = json.loads(before)
    UNLAWFUL[what](node, node["codecs"][0]["configuration"])
    file.write_text(json.dumps(node))
    found = problems(rewritten)
    file.write_text(before)
    assert len(found) == 1 and name.removeprefix("parts/0/") in found[0]
    if "cannot be" in found[0]:  # decoded or opened: nobody can read it
        assert what in ("other codecs", "more than one shard")
    elif name == "manifest":
        assert found == ["altered file manifest/zarr.json"]
    else:
        assert found[0].startswith("part 0: array text/utf8 is stored with") and what in found[0]


def test_chunks_without_a_checksum_are_found_in_hdf5(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        values = file["parts/1/token/id"][:]
        del file["parts/1/token/id"]
        file["parts/1/token"].create_dataset("id", data=values, chunks=(64,))
    assert "part 1: array token/id is stored with chunks without Fletcher-32" in "\n".join(
        verify(path).problems
    )


def run(python: str, *arguments: str) -> str:
    root = Path(__file__).parents[2]
    return printed_by(python, *arguments, cwd=root, PYTHONPATH=str(root))


@pytest.mark.skipif(OTHER is None, reason="TEACHONCE_OTHER_ZARR names no Python")
def test_another_release_of_zarr(tmp_path: Path) -> None:
    """A store that one release of zarr writes is sound for the other, with or without `store`."""
    import zarr

    assert OTHER
    theirs = run(OTHER, "-c", "import zarr; print(zarr.__version__)").strip()
    assert theirs != zarr.__version__
    make = "from pathlib import Path; from tests.making.stores import *; make_store(Path('{}'),"
    check = "from teachonce.store.tools.verify import verify; print(verify('{}').problems)"
    ours, other = tmp_path / "ours.zarr", tmp_path / "other.zarr"
    make_store(ours, features_of(), parts=1)
    run(OTHER, "-c", make.format(other) + " features_of(), parts=1)")
    assert_sound(other, ours)
    assert run(OTHER, "-c", check.format(ours)).strip() == "[]"
    for path, python, reader in ((ours, OTHER, sys.executable), (other, sys.executable, OTHER)):
        run(python, "-m", "tests.store.rewriting", str(path), "5")
        assert run(reader, "-c", check.format(path)).strip() == "[]"


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, list) and np.asarray(expected).dtype.kind == "f":
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-7), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", STORES)
def test_golden_stores_read_as_they_did(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    fs = open_store(GOLDEN / name)
    assert len(fs) == 3 and fs.meta["version"] == 1
    assert_same(values_of(fs), expected, name)
    problems = verify(GOLDEN / name).problems
    if name not in ("default.zarr", "default.h5", "small.h5"):
        assert problems == []
    else:  # they hold a placeholder for a tokenizer
        assert len(problems) == 1 and "tokenizer.json in it cannot be loaded" in problems[0]
