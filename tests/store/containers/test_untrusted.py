"""An untrusted store is refused with one line, and reads no file outside of itself.

- Untrusted stores, forged at random, are refused in one line or read as before.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from numcodecs import Blosc

from teachonce.store import StoreError, open_store
from teachonce.store.format.manifest import seal_checksum
from teachonce.store.tools.verify import verify
from tests.integrity.forged_json import mutated, places
from tests.integrity.forgery import HOW, Watch, in_process
from tests.making.stores import Copy
from tests.store.rewriting import zarr_array


def edit_root(path: Path, **changes: Any) -> None:
    file = path / "zarr.json"
    root = json.loads(file.read_text())
    root["attributes"] |= changes
    file.write_text(json.dumps(root))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Alter the manifest of a Zarr store and seal it again, as a forger would."""
    value = json.loads(zarr_array(path / "manifest").tobytes())
    edit(value)
    data = json.dumps(value).encode()
    created = json.loads((path / "zarr.json").read_text())["attributes"]["created"]
    array = zarr.create_array(
        path / "manifest", shape=len(data), dtype="uint8", compressors=None, overwrite=True
    )
    array[:] = np.frombuffer(data, np.uint8)
    edit_root(path, checksum=seal_checksum(data, created), arrays=value["arrays"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a feature store"),
        ({"version": 3}, "format version 3; this software reads versions 1 and 2"),
        ({"version": "1"}, "format version '1'"),
        ({"version": True}, "format version True"),
        ({"state": "open"}, "state is 'open'"),
        ({"identity": []}, "identity is not a JSON object"),
        ({"created": 5}, "created is not a time"),
        ({"features": None}, "features must be a JSON object"),
        ({"checksum": "00"}, "does not match its checksum"),
        ({"created": "2020-01-01T00:00:00Z"}, "does not match its checksum"),
        ({"identity": {"x": 1}}, "attributes were altered"),
        ({"software": {"x": 1}}, "attributes were altered"),
    ],
)
def test_root_attributes(copy: Copy, changes: dict[str, Any], message: str) -> None:
    path = copy("zarr")
    edit_root(path, **changes)
    with pytest.raises(StoreError, match=f"^{path}: .*{message}"):
        open_store(path)


def _part(value: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = value["parts"][0]
    return part


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m.update(parts={}), "no list of parts"),
    (lambda m: _part(m).update(part="../../etc"), "part of the manifest is not valid"),
    (lambda m: _part(m).update(part=-1), "out of range"),
    (lambda m: _part(m).update(part=1), "not in order"),
    (lambda m: _part(m)["counts"].update(tokens=10**15), "tokens is 1000000000000000"),
    (lambda m: _part(m)["counts"].update(tokens=1.5), "tokens is 1.5"),
    (lambda m: _part(m)["counts"].update(tokens=10**9), "expected .*1000000000"),
    (lambda m: _part(m)["counts"].update(spans=[0]), "spans must have one number for each view"),
    (lambda m: _part(m)["arrays"].update({"../x": {}}), "arrays do not match"),
    (lambda m: _part(m)["arrays"].update({"token/id": 7}), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(sha256="\ud800"), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(sha256="g" * 64), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(zarr_json="0" * 63), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(zarr_json=[7]), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(dtype="object"), "is object"),
    (lambda m: m["arrays"].update({"teacher/files/../../x": {}}), "does not belong|cannot be a"),
    (lambda m: m["arrays"].update({"teacher/files/..": {}}), "cannot be a name"),
    (lambda m: m["arrays"].update({"/etc/passwd": {}}), "does not belong in a store"),
]


@pytest.mark.parametrize(("edit", "message"), FORGERIES)
def test_forged_manifests(copy: Copy, edit: Callable[[Any], Any], message: str) -> None:
    path = copy("zarr")
    edit_manifest(path, edit)
    with pytest.raises(StoreError, match=message):
        open_store(path)


def test_a_manifest_that_lies_about_an_array_is_found_before_reading(copy: Copy) -> None:
    path = copy("zarr")

    def grow(value: dict[str, Any]) -> None:
        part = _part(value)
        part["counts"]["text_bytes"] = 10**12
        part["arrays"]["text/utf8"]["shape"] = [10**12]

    edit_manifest(path, grow)
    fs = open_store(path)
    with pytest.raises(StoreError, match=r"text/utf8 is .*the manifest has|does not ascend"):
        fs[0].text  # noqa: B018


def test_forged_starts_are_refused(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["parts/0/sequence/token_start"][1] = 10**12
        file["parts/1/sequence/text_start"][1] = -5
        file["parts/2/view1/mask/start"][1] = 10**12
    fs = open_store(path)
    reads: tuple[Callable[[], object], ...] = (
        lambda: fs[0],
        lambda: fs[12].text,
        lambda: fs[24].views[1].spans,
    )
    for read in reads:
        with pytest.raises(StoreError, match="ascend"):
            read()


def test_a_manifest_that_unpacks_to_far_more_than_is_stored(copy: Copy) -> None:
    """A compressed manifest is limited by its decoded size: empty lists in JSON take 20 times their
    bytes in memory, and compress to a thousandth."""
    data = b'{"x": [' + b"[]," * 2**21 + b"[]]}"
    for ext in ("zarr", "h5"):
        path = copy(ext)
        if ext == "zarr":
            packing = zarr.codecs.BloscCodec(cname="zstd", clevel=5, shuffle="noshuffle")
            array: Any = zarr.create_array(
                path / "manifest", shape=len(data), dtype="uint8", chunks=(2**20,),
                shards=(2**23,), compressors=[packing], overwrite=True,
            )  # fmt: skip
            array[:] = np.frombuffer(data, np.uint8)
        else:
            with h5py.File(path, "r+") as file:
                del file["manifest"]
                file.create_dataset(
                    "manifest", data=np.frombuffer(data, np.uint8), chunks=(2**20,),
                    **hdf5plugin.Blosc(cname="zstd"),
                )  # fmt: skip
        with pytest.raises(StoreError, match=r"manifest: declares 6,291,4\d\d bytes"):
            open_store(path)


def test_metadata_of_any_size_is_not_read(
    copy: Copy, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy("zarr")
    monkeypatch.setattr("teachonce.store.containers.zarr.files.MAX_JSON", 10_000)
    monkeypatch.setattr("teachonce.store.containers.hdf5.tree.MAX_JSON", 10_000)
    edit_root(path, software={"x": "y" * 20_000})
    memory.pipe_file("/large.zarr/zarr.json", (path / "zarr.json").read_bytes())
    for place in (str(path), "memory://large.zarr"):
        with pytest.raises(StoreError, match=r"zarr.json is larger than 10,000 bytes"):
            open_store(place)


def forge_array(path: Path, data: bytes, codecs: list[Any], chunk: int) -> None:
    """Replace the file and the codecs of an array, and alter the manifest with them."""
    node = json.loads((path / "parts/0/token/id/zarr.json").read_text())
    known = hashlib.sha256((path / "parts/0/token/id/zarr.json").read_bytes()).hexdigest()
    node["codecs"] = codecs
    node["chunk_grid"]["configuration"]["chunk_shape"] = [chunk]
    text = json.dumps(node)
    (path / "parts/0/token/id/zarr.json").write_text(text)
    (path / "parts/0/token/id/c/0").write_bytes(data)
    digest = hashlib.sha256(text.encode()).hexdigest()
    edit_manifest(path, lambda m: m.update(json.loads(json.dumps(m).replace(known, digest))))


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle",
                                            "typesize": 4, "blocksize": 0}}  # fmt: skip
SHARDED = {"chunk_shape": [8], "index_codecs": [LITTLE], "index_location": "end"}


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ([LITTLE, {"name": "zstd", "configuration": {}}], "codec 'zstd' is not allowed in a store"),
        ([LITTLE, {"name": "gzip", "configuration": {"level": 1}}], "codec 'gzip' is not allowed"),
        ([LITTLE, "zstd"], "codec 'zstd' is not allowed"),
        ([{"name": "sharding_indexed", "configuration": {**SHARDED, "codecs": [
            LITTLE, {"name": "numcodecs.zlib"}]}}], "codec 'numcodecs.zlib' is not allowed"),
        ([LITTLE, BLOSC], "a chunk decodes to 16777216 bytes, expected 8000"),
    ],
)  # fmt: skip
def test_a_chunk_that_unpacks_to_more_than_it_holds(
    copy: Copy, codecs: list[Any], message: str
) -> None:
    """A chunk that decodes to more bytes than its shape is refused, also in zarr-python's
    decoder."""
    path = copy("zarr")
    bomb = Blosc("zstd", 1, 0).encode(np.zeros(2**22, np.uint32))
    forge_array(path, bomb, codecs, 2000)
    with pytest.raises(StoreError, match=message) as caught:
        open_store(path)[0].token_ids  # noqa: B018
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"compression": "gzip"}, {"shuffle": True}])
def test_filters_of_hdf5_that_are_not_allowed_in_a_store(
    copy: Copy, settings: dict[str, Any]
) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        values = file["parts/0/token/id"][:]
        del file["parts/0/token/id"]
        file.create_dataset("parts/0/token/id", data=values, chunks=(9,), **settings)
    with pytest.raises(StoreError, match=r"token/id: HDF5 filter [12] is not allowed in a store"):
        open_store(path)[0].token_ids  # noqa: B018


def test_text_that_is_not_utf8(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["parts/0/text/utf8"][0] = 255
    with pytest.raises(StoreError, match="not UTF-8"):
        list(open_store(path).texts())


def test_hdf5_of_other_shapes(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        del file["calibration/hidden/mean/mean"]
        file["calibration/hidden/mean/mean"] = np.zeros(3, "f4")
    with pytest.raises(StoreError, match="the manifest has"):
        open_store(path)


def test_parts_next_to_a_sealed_file_are_not_read(copy: Copy) -> None:
    path = copy("h5")
    before = open_store(path)[0].views[0].hidden["mean"]
    aside = Path(f"{path}.parts")
    aside.mkdir()
    with h5py.File(path) as sound, h5py.File(aside / "0.h5", "w") as stale:
        sound.copy("parts/0", stale.create_group("parts"))
        values = stale["parts/0/view0/hidden/mean/values"]
        values[...] = np.roll(values[...], 5, axis=1)
    assert (open_store(path)[0].views[0].hidden["mean"] == before).all()


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    (tmp_path / "b.h5").write_text("text")
    (tmp_path / "c.zarr").mkdir()
    (tmp_path / "d.zarr").mkdir()
    (tmp_path / "d.zarr" / "zarr.json").write_text("[1]")
    zarr.create_group(tmp_path / "e.zarr")
    h5py.File(tmp_path / "f.h5", "w").close()
    zipped = shutil.make_archive(str(tmp_path / "g.zarr"), "zip", tmp_path / "c.zarr")
    shutil.copy(zipped, tmp_path / "G.ZIP")
    for name, message in (
        ("a.h5", "not a readable HDF5 file"),
        ("b.h5", "neither a Zarr folder nor HDF5"),
        ("c.zarr", "a folder without zarr.json"),
        ("d.zarr", "not Zarr format 3"),
        ("e.zarr", "not a feature store"),
        ("f.h5", "not a feature store"),
        ("g.zarr.zip", rf"an archive\); unpack it \(`unzip {zipped}`\) and give the store"),
        ("G.ZIP", r"an archive\); unpack it \(`unzip "),
    ):
        with pytest.raises(StoreError, match=message) as caught:
            open_store(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_blocks_from_outside_are_checked(copy: Copy) -> None:
    fs = open_store(copy("h5"))
    for blocks in ([[0, 13]], [[3, 3]], [[-1, 2]], [[30, 99]], [0, 1], [[0, 1.5]]):
        with pytest.raises(StoreError, match="blocks must be"):
            fs.stream(blocks=blocks)
    assert list(fs.stream(blocks=[])) == []


FORGERIES_PER_FORMAT = 12  # of each format


@pytest.mark.slow
@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_forged_stores(tmp_path: Path, ext: str) -> None:
    """A process with 1 GB of extra memory reads forged stores; it opens and starts nothing else."""
    found = in_process(tmp_path, ext, seed=1, count=FORGERIES_PER_FORMAT)
    assert found["wrong"] == []
    assert found["refused"] > FORGERIES_PER_FORMAT // 3
    assert sum(found[how] for how in HOW) == FORGERIES_PER_FORMAT


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", ("/etc/passwd", "r", 0)),
        ("open", ("inside/link", "r", 0)),
        ("os.listdir", ("/",)),
        ("os.remove", ("inside/file",)),
        ("open", ("inside/file", "w", os.O_WRONLY)),
        ("subprocess.Popen", ("ls",)),
    ],
)
def test_what_the_watch_forbids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, arguments: tuple[Any, ...]
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)
    monkeypatch.setattr(Watch, "_end", lambda _, event, arguments: ended.append(event))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/link").symlink_to("/etc/passwd")
    watch = Watch(tmp_path / "inside")
    watch._hook(event, arguments)
    assert not ended
    watch.on = True
    watch._hook("open", ("inside/file", "r", 0))
    assert not ended
    watch._hook(event, arguments)
    assert ended == [event]


def test_the_forger_does_change_things() -> None:
    value = {"a": [1, {"b": "c"}], "d": {}}
    assert set(places(value)) == {("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("d",)}
    chance = random.Random(0)
    changed = [mutated(value, chance) for _ in range(50)]
    assert sum(other != value for other in changed) > 40
    assert value == {"a": [1, {"b": "c"}], "d": {}}


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_nothing_outside_a_zarr_store_is_read(tmp_path: Path, copy: Copy, kind: str) -> None:
    path = copy("zarr")
    secret = tmp_path / "secret"
    shard = path / "parts/0/token/id/c/0"
    if kind == "folder":
        shutil.move(path / "parts/0", secret)
        (path / "parts/0").symlink_to(secret)
    else:
        shutil.copy(shard, secret)
        shard.unlink()
        shard.symlink_to(secret) if kind == "link" else os.mkfifo(shard)
    words = (
        "not an ordinary file" if kind == "pipe" else "a symbolic link to a place outside the store"
    )
    with pytest.raises(StoreError, match=words):
        open_store(path)[0].token_ids  # noqa: B018
    assert any(words in line for line in verify(path).problems)


def test_a_link_inside_the_store_is_followed(copy: Copy) -> None:
    path = copy("zarr")
    (path / "parts/0/token").rename(path / "moved")
    (path / "parts/0/token").symlink_to("../../moved")
    assert len(open_store(path)[0].token_ids)
    report = verify(path)
    assert report.problems == [] and report.unknown == ["extra folder moved"]


@pytest.mark.parametrize("kind", ["external", "soft", "raw", "virtual"])
def test_nothing_outside_an_hdf5_store_is_read(tmp_path: Path, copy: Copy, kind: str) -> None:
    path, secret, name = copy("h5"), tmp_path / "secret.h5", "parts/0/token/id"
    with h5py.File(path, "r+") as file, h5py.File(secret, "w") as other:
        ids = file[name][:]
        other["ids"] = ids
        del file[name]
        if kind == "external":
            file[name] = h5py.ExternalLink(str(secret), "ids")
        elif kind == "soft":
            file[name] = h5py.SoftLink("/parts/1/token/id")
        elif kind == "raw":
            (tmp_path / "raw").write_bytes(ids.tobytes())
            where = [(str(tmp_path / "raw"), 0, ids.nbytes)]
            file.create_dataset(name, ids.shape, ids.dtype, external=where)
        else:
            layout = h5py.VirtualLayout(ids.shape, ids.dtype)
            layout[:] = h5py.VirtualSource(str(secret), "ids", ids.shape)
            file.create_virtual_dataset(name, layout)
    with pytest.raises(StoreError, match="not followed"):
        open_store(path)[0].token_ids  # noqa: B018


def test_declared_sizes_are_compared_with_what_is_stored(copy: Copy) -> None:
    path, name = copy("h5"), "calibration/hidden/mean/mean"
    with h5py.File(path, "r+") as file:
        del file[name]
        file.create_dataset(name, (2**40,), np.float32, chunks=(2**20,))
    with pytest.raises(
        StoreError, match="declares 4,398,046,511,104 bytes .* 0 bytes that are stored"
    ):
        open_store(path)
