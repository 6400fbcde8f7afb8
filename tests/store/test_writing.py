"""Writing: what is refused, resuming, and equal bytes for equal input."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import Features, LogitsSpec, StoreError, StoreWriter, UserError, open_store
from tests.store.making import IDENTITY, begin, features_of, make_part, make_store, put_part

EXT = ("zarr", "h5")
SMALL = dataclasses.replace(features_of(), hidden=("mean",), attention=(), views=1)


def contents(path: Path) -> dict[str, str]:
    """Digest of every file of a store, with `created` (and the checksum over it) blanked."""
    fs = open_store(path)
    fs.close()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    digests = {}
    for file in files:
        data = file.read_bytes().replace(fs.meta["created"].encode(), b"-" * 20)
        if file in (path, path / "zarr.json"):
            checksum = fs.source.attributes()["checksum"].encode()
            data = _without_metadata_checksums(data.replace(checksum, b"-" * 64), file)
        digests[str(file.relative_to(path.parent))[len(path.name) :]] = digest(data)
    fs.close()
    return digests


def _without_metadata_checksums(data: bytes, file: Path) -> bytes:
    """HDF5 checksums the header that holds `created`: blank the four bytes after it."""
    if file.suffix != ".h5":
        return data
    import h5py

    with h5py.File(file) as opened:
        size = h5py.h5o.get_info(opened.id).hdr.space.total
    end = data.index(b"OHDR") + size
    return data[: data.index(b"OHDR")] + data[end:]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("ext", EXT)
def test_a_resumed_store_equals_an_undisturbed_one(tmp_path: Path, ext: str) -> None:
    one, two = tmp_path / "1" / f"a.{ext}", tmp_path / "2" / f"a.{ext}"
    one.parent.mkdir()
    two.parent.mkdir()
    make_store(one, SMALL)
    parts = [make_part(SMALL, seed) for seed in range(3)]
    writer = begin(two, SMALL)
    put_part(writer, 2, parts[2], seed=5)
    half = writer.part(0, parts[0].token_counts)
    half.put_hidden(0, "mean", [0], parts[0].hidden[0, "mean"][:1])
    assert StoreWriter.peek(two)["identity"] == IDENTITY  # type: ignore[index]
    writer.close()
    writer = begin(two, SMALL, calibration={}, weights=None, files={})
    assert writer.published == {2}
    put_part(writer, 1, parts[1])
    put_part(writer, 0, parts[0], seed=9)
    writer.seal()
    assert contents(one) == contents(two)
    assert sorted(f.name for f in two.parent.iterdir()) == [f"a.{ext}"]
    assert StoreWriter.peek(two) is None


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    assert StoreWriter.peek(path) is None
    writer = begin(path, SMALL)
    part = make_part(SMALL, 0)
    put_part(writer, 3, part)
    with pytest.raises(StoreError, match="still being written"):
        open_store(path)
    fs = open_store(path, allow_partial=True)
    assert len(fs) == 12 and fs[3].text == part.texts[3] and fs.meta["state"] == "writing"
    assert (StoreWriter.calibration(path)["mean"][1] == fs.calibration["mean"][1]).all()
    with pytest.raises(StoreError, match="part 3 is published already"):
        writer.part(3, [4])
    fs.close()
    writer.seal()
    with pytest.raises(UserError, match="exists already"):
        begin(path, SMALL)
    assert len(open_store(path)) == 12


@pytest.mark.parametrize("ext", EXT)
def test_other_arguments_are_named(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    begin(path, SMALL)
    other = IDENTITY | {"teacher": IDENTITY["teacher"] | {"revision": "2"}}
    with pytest.raises(UserError, match=r"identity.teacher.revision is '1' in the store and '2'"):
        begin(path, SMALL, identity=other)
    with pytest.raises(UserError, match=r"features.max_length is '64' .* '32' now"):
        begin(path, dataclasses.replace(SMALL, max_length=32))


def test_taken_names_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("mine")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "c.zarr").write_text("mine")
    (tmp_path / "d.h5").mkdir()
    for name in ("a.h5", "b.zarr", "c.zarr", "d.h5"):
        with pytest.raises(UserError, match="not a feature store.*nothing was touched"):
            begin(tmp_path / name, SMALL)
    assert (tmp_path / "a.h5").read_text() == (tmp_path / "c.zarr").read_text() == "mine"
    with pytest.raises(UserError, match=r"must end in .zarr .* or .h5"):
        begin(tmp_path / "a.npz", SMALL)
    with pytest.raises(UserError, match="local path"):
        begin("s3://bucket/a.zarr", SMALL)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist; make it"):
        begin(tmp_path / "no" / "a.zarr", SMALL)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("ext", EXT)
def test_two_processes_never_write_one_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    writer = begin(path, SMALL)
    script = (
        "import sys; from tests.store.test_writing import *\n"
        "try: begin(Path(sys.argv[1]), SMALL)\n"
        "except StoreError as error: print(error)"
    )
    run = [sys.executable, "-c", script, str(path)]
    root = Path(__file__).parents[2]
    first = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    assert "another process is writing this store" in first.stdout
    writer.close()
    second = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    assert second.stdout == ""


def put_one(features: Features = SMALL) -> tuple[Any, Any]:
    part = make_part(features, 0)
    written: list[Any] = []
    from store.part_writer import PartWriter
    from tests.store.making import calibration_of

    writer = PartWriter(
        features, calibration_of(features), part.token_counts,
        lambda counts, arrays: written.append(arrays), "x.zarr: part 4",
    )  # fmt: skip
    return writer, part


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, r"part 4, sequence 2, token 1: view0/hidden/mean is NaN or infinite"),
        (np.inf, r"sequence 2, token 1: .* NaN or infinite"),
        (3e38, r"sequence 2, token 1: .* deviations away"),
    ],
)
def test_unusable_states_name_the_sequence(bad: float, message: str) -> None:
    writer, part = put_one()
    rows = np.arange(len(part.token_ids))
    states = part.hidden[0, "mean"].copy()
    states[writer.token_start[2] + 1, 5] = bad
    with pytest.raises(StoreError, match=message):
        writer.put_hidden(0, "mean", rows, states)


def test_rows_are_put_exactly_once() -> None:
    writer, part = put_one()
    states = part.hidden[0, "mean"]
    writer.put_hidden(0, "mean", [3, 1], states[[3, 1]])
    for rows in ([1], [4, 4]):
        with pytest.raises(StoreError, match="put twice"):
            writer.put_hidden(0, "mean", rows, states[rows])
    with pytest.raises(StoreError, match="must lie in 0"):
        writer.put_hidden(0, "mean", [10**6], states[:1])
    with pytest.raises(StoreError, match=r"has shape \[2, 37\], expected \[1, 37\]"):
        writer.put_hidden(0, "mean", [9], states[:2])
    with pytest.raises(StoreError, match="no view0/hidden/max; it has"):
        writer.put_hidden(0, "max", [9], states[:1])
    with pytest.raises(StoreError, match="not put: view0/hidden/mean, view0/logits, sequences"):
        writer.publish()


def test_unusable_logits_are_refused() -> None:
    writer, part = put_one()
    put = {name: array[:1].copy() for name, array in part.logits[0].items()}
    for key, value, message in (
        ("ids", 1000, "outside the vocabulary"),
        ("ids", -1, "outside the vocabulary"),
        ("logprobs", 0.5, "not a log-probability"),
        ("rest", np.nan, "not a log-probability"),
        ("log_partition", np.inf, "NaN or infinite"),
    ):
        fresh, bad = put_one()[0], {name: array.copy() for name, array in put.items()}
        bad[key].reshape(-1)[0] = value
        with pytest.raises(StoreError, match=f"sequence 0, token 0: .*{message}"):
            fresh.put_topk(0, [0], **bad)
    with pytest.raises(StoreError, match="are topk, not head"):
        writer.put_head(0, [0], np.ones((1, 4)), [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["\ud800x"]}, "sequence 0: the text has half of a surrogate pair"),
        ({"token_ids": [2, 5000, 3]}, "sequence 0, token 1: token id outside the vocabulary"),
        ({"offsets": [(0, 0), (0, 9), (0, 0)]}, "token 1: offsets outside the text"),
        ({"offsets": [(0, 0), (0, 2), (1, 2)]}, "token 2: special token with offsets"),
        ({"document": [1, 2]}, r"document has shape \[2\], expected \[1\]"),
    ],
)
def test_bad_sequences_are_refused(change: dict[str, Any], message: str) -> None:
    from store.part_writer import PartWriter

    features = Features(max_length=9, vocabulary=100)
    writer = PartWriter(features, {}, [3], lambda c, a: None, "x: part 0")
    good: dict[str, Any] = {
        "texts": ["ab"], "document": [0], "document_begin": [0], "hard_cut": [False],
        "token_ids": [2, 50, 3], "offsets": [(0, 0), (0, 2), (0, 0)], "special": [1, 0, 1],
    }  # fmt: skip
    writer.set_sequences(**good)
    with pytest.raises(StoreError, match=message):
        writer.set_sequences(**(good | change))


def test_bad_counts_masks_and_features() -> None:
    from store.part_writer import PartWriter

    features = Features(max_length=9, vocabulary=100, views=2)
    for counts, message in (([], "at least one"), ([3, 10], "sequence 1: 10"), ([0], "0 tokens")):
        with pytest.raises(StoreError, match=message):
            PartWriter(features, {}, counts, lambda c, a: None, "x: part 0")
    writer = PartWriter(features, {}, [3], lambda c, a: None, "x: part 0")
    writer.set_sequences(["abcd"], [0], [0], [0], [1, 2, 3], [(0, 1), (1, 2), (2, 4)], [0, 0, 0])
    for spans in ([(2, 3, 0), (0, 1, 0)], [(0, 2, 0), (1, 3, 0)], [(0, 9, 0)], [(0, 1, 3)]):
        with pytest.raises(StoreError, match="sequence 0: masked words must be ascending"):
            writer.set_masks(1, [spans])
    with pytest.raises(StoreError, match="masks of view 1"):
        writer.publish()
    for bad in (
        {"hidden": ("../x",)}, {"hidden": ("a", "a")}, {"codec": "zip"}, {"views": 0},
        {"width": True}, {"vocabulary": 2, "logits": LogitsSpec("topk", 3)}, {"attention": ("/",)},
    ):  # fmt: skip
        with pytest.raises(StoreError, match="features|name in a store"):
            Features(**bad)
    with pytest.raises(StoreError, match="tier must be one of"):
        LogitsSpec("all", 3)


def test_features_survive_json() -> None:
    for tier in (None, "topk", "sample", "head"):
        features = features_of("small", tier)
        value = json.loads(json.dumps(features.to_json()))
        assert Features.from_json(value) == features
        with pytest.raises(StoreError, match="encodings"):
            Features.from_json(value | {"encodings": {}})
        with pytest.raises(StoreError, match="lack codec"):
            Features.from_json({k: v for k, v in value.items() if k != "codec"})


@pytest.mark.parametrize("ext", EXT)
def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(tmp_path / f"a.{ext}", SMALL)
    put_part(writer, 0, make_part(SMALL, 0))
    from store import disk

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("sync", "sync_tree"):
            patch.setattr(disk, name, full)
        patch.setattr("store.zarr_tree.sync_tree", full)
        with pytest.raises(StoreError, match="cannot write part 1 of .*No space left.*start again"):
            put_part(writer, 1, make_part(SMALL, 1))
    put_part(writer, 1, make_part(SMALL, 1))
    writer.seal()
    assert len(open_store(tmp_path / f"a.{ext}")) == 24


def test_nothing_to_seal(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no part was published"):
        begin(tmp_path / "a.h5", SMALL).seal()


@pytest.mark.parametrize("ext", EXT)
def test_a_big_identity(tmp_path: Path, ext: str) -> None:
    """HDF5 keeps small attributes only in its object headers (64 KiB)."""
    identity = IDENTITY | {"labels": [f"étiquette {n}" for n in range(20_000)]}
    make_store(tmp_path / f"a.{ext}", SMALL, parts=1, identity=identity)
    assert open_store(tmp_path / f"a.{ext}").identity == identity
