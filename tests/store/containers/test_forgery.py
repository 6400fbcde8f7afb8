"""Untrusted stores, forged at random, are refused in one line or read as before."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.tools.verify import verify
from tests.integrity.forged_json import mutated, places
from tests.integrity.forgery import HOW, Watch, in_process

Copy = Callable[..., Path]
FORGERIES = 12  # of each format


@pytest.mark.slow
@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_forged_stores(tmp_path: Path, ext: str) -> None:
    """A process with 1 GB of extra memory reads forged stores; it opens and starts nothing else."""
    found = in_process(tmp_path, ext, seed=1, count=FORGERIES)
    assert found["wrong"] == []
    assert found["refused"] > FORGERIES // 3
    assert sum(found[how] for how in HOW) == FORGERIES


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
