"""Writing: refusals, resuming, and equal bytes for equal input."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import shutil
import tempfile
from collections.abc import Generator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from teachonce.store import Features, StoreError, StoreWriter, UserError, open_store
from teachonce.store.containers.hdf5.tree import Hdf5File
from teachonce.store.containers.memory_map import OpenFiles
from teachonce.store.write.tree import OutsideParts
from teachonce.support import files
from tests.making.stores import (
    IDENTITY,
    SMALL,
    begin,
    features_of,
    make_part,
    make_store,
    put_part,
    unfinished,
)

EXT = ("zarr", "h5")


def contents(path: Path) -> dict[str, str]:
    """Return the digest of every file of a store, with `created` and its checksums blanked."""
    fs = open_store(path)
    fs.close()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    digests = {}
    for file in files:
        data = file.read_bytes().replace(fs.meta["created"].encode(), b"-" * 20)
        if file == path / "zarr.json":
            data = data.replace(fs.source.attributes()["checksum"].encode(), b"-" * 64)
        elif file == path:
            data = _blanked(file)
        digests[str(file.relative_to(path.parent))[len(path.name) :]] = digest(data)
    fs.close()
    return digests


def _blanked(file: Path) -> bytes:
    """Blank an HDF5 file: a checksum covers the header with `created`, and a SHA-256 the file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(file, folder))
        with h5py.File(copy, "r+") as opened:
            for key in ("created", "checksum"):
                opened.attrs.modify(key, np.bytes_(b"-" * len(opened.attrs[key])))
        return copy.read_bytes()[: file.stat().st_size - 32]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("ext", EXT)
def test_a_resumed_store_equals_an_undisturbed_one(tmp_path: Path, ext: str) -> None:
    one, two = tmp_path / f"1.{ext}", tmp_path / f"2.{ext}"
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
    assert {*tmp_path.iterdir()} == {one, two}
    assert StoreWriter.peek(two) is None


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    assert StoreWriter.peek(path) is None
    writer = begin(path, SMALL)
    part = make_part(SMALL, 0)
    put_part(writer, 3, part)
    with pytest.raises(StoreError, match=r"is not finished .*with open_store.*partial=True"):
        open_store(path)
    fs = open_store(path, allow_partial=True)
    assert len(fs) == 12 and fs[3].text == part.texts[3] and fs.meta["state"] == "writing"
    stored = StoreWriter.calibration(path)
    assert stored and (stored["mean"][1] == fs.calibration["mean"][1]).all()
    with pytest.raises(StoreError, match="part 3 is published already"):
        writer.part(3, [4])
    fs.close()
    writer.seal()
    with pytest.raises(UserError, match="exists already"):
        begin(path, SMALL)
    assert len(open_store(path)) == 12


def test_an_unfinished_store_without_a_part(tmp_path: Path) -> None:
    unfinished(tmp_path / "a.zarr", features_of(tier="embedding"), parts=0)
    fs = open_store(tmp_path / "a.zarr", allow_partial=True)
    assert fs.embeddings().shape == (0, 33) and fs.blocks().shape == (0, 2)
    assert [*fs.stream(), *fs.texts(), *fs.table().batches()] == []
    assert fs.to_parquet(tmp_path / "rows") == [] and fs.batch_count() == 0


@pytest.mark.parametrize("ext", EXT)
def test_other_arguments_are_named(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    begin(path, SMALL)
    other = IDENTITY | {"teacher": IDENTITY["teacher"] | {"revision": "2"}}
    with pytest.raises(UserError, match=r"the model \(revision\) is '1' in the store and '2'"):
        begin(path, SMALL, identity=other)
    with pytest.raises(UserError, match=r"--max-length is '64' .* '32' now"):
        begin(path, dataclasses.replace(SMALL, max_length=32))


def test_taken_names_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("mine")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "c.zarr").write_text("mine")
    (tmp_path / "d.h5").mkdir()
    for name in ("a.h5", "b.zarr", "c.zarr", "d.h5"):
        with pytest.raises(UserError, match="not a feature store.*nothing was changed"):
            begin(tmp_path / name, SMALL)
    assert (tmp_path / "a.h5").read_text() == (tmp_path / "c.zarr").read_text() == "mine"
    with pytest.raises(UserError, match=r"must end in .zarr .* or .h5"):
        begin(tmp_path / "a.npz", SMALL)
    with pytest.raises(UserError, match="local path"):
        begin("http://127.0.0.1:9/a.zarr", SMALL)
    with pytest.raises(UserError, match="does not exist; make it"):
        begin(tmp_path / "no" / "a.zarr", SMALL)
    with pytest.raises(UserError, match="a.h5 is a file; give a path in a folder"):
        begin(tmp_path / "a.h5" / "a.zarr", SMALL)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_store_begun_with_an_earlier_form_of_the_codec(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    begin(path, dataclasses.replace(features_of("small"), form=1)).close()
    for codec, views in (("small", 2), ("default", 2), ("small", 3)):
        with pytest.raises(UserError, match="with other arguments: .*in the store and .* now"):
            begin(path, features_of(codec, views=views))
    begin(path, dataclasses.replace(features_of("small"), form=1)).close()


@pytest.mark.parametrize("ext", EXT)
def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(tmp_path / f"a.{ext}", SMALL)
    put_part(writer, 0, make_part(SMALL, 0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("sync", "sync_tree"):
            patch.setattr(files, name, full)
        patch.setattr("teachonce.store.containers.zarr.tree.sync_tree", full)
        with pytest.raises(StoreError, match="cannot write part 1 of .*No space left.*run the"):
            put_part(writer, 1, make_part(SMALL, 1))
    put_part(writer, 1, make_part(SMALL, 1))
    writer.seal()
    assert len(open_store(tmp_path / f"a.{ext}")) == 24


def test_weights_that_nobody_takes_any_more_end_in_silence() -> None:
    """Abandoned weights (full disk) raise nothing if another context closes their generator."""
    weights = {"a": np.ones(3, np.float32), "b": np.full(3, 1e9, np.float32)}
    arrays, before = OutsideParts(weights=weights).arrays(Features(width=4)), np.geterr()
    assert isinstance(arrays, Generator)
    assert next(arrays)[0] == "teacher/weights/a"
    assert np.geterr() == before
    copy_context().run(arrays.close)


def test_more_parts_than_a_process_may_have_files(tmp_path: Path) -> None:
    writer, part = begin(tmp_path / "a.h5", SMALL), make_part(SMALL, 0, sequences=1)
    for number in range(9):
        put_part(writer, number, part)
    fs = open_store(tmp_path / "a.h5", allow_partial=True)
    source: Any = fs.source
    source._files = OpenFiles[Hdf5File](3)
    for _ in range(2):
        assert [record.text for record in fs] == part.texts * 9
        assert [len(fs.part(place).all("token/id")) for place in range(9)]
        assert len(source._files) <= 3
    fs.close()
    writer.seal()
    assert len(open_store(tmp_path / "a.h5")) == 9


def test_nothing_to_seal(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no part was published"):
        begin(tmp_path / "a.h5", SMALL).seal()


@pytest.mark.parametrize("ext", EXT)
def test_a_big_identity(tmp_path: Path, ext: str) -> None:
    """A large identity is stored in HDF5, whose headers hold only small attributes (64 KiB)."""
    identity = IDENTITY | {"labels": [f"étiquette {n}" for n in range(20_000)]}
    make_store(tmp_path / f"a.{ext}", SMALL, parts=1, identity=identity)
    assert open_store(tmp_path / f"a.{ext}").identity == identity
