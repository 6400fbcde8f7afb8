"""An open store can be passed to other processes: forked, or spawned with its address."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from teachonce.store import FeatureStore, open_store
from teachonce.store.tools.copy import upload
from tests.making.stores import SMALL, unfinished

Made = Callable[..., Any]


def read_all(fs: FeatureStore, queue: Any) -> None:
    queue.put([batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_other_processes_read_the_same(made: Made, ext: str, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    fs = open_store(made(ext)[0])
    expected = [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)]
    queue = context.Queue()
    process = context.Process(target=read_all, args=(fs, queue))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0
    assert [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)] == expected


def test_a_pickled_store_is_its_address(tmp_path: Path, made: Made) -> None:
    fs = open_store(made("zarr")[0])
    address = pickle.dumps(fs)
    assert len(address) < 1000
    again = pickle.loads(address)
    assert again.meta == fs.meta and again[7].text == fs[7].text

    unfinished(tmp_path / "a.h5", SMALL)
    part = open_store(tmp_path / "a.h5", allow_partial=True)
    assert len(pickle.loads(pickle.dumps(part))) == len(part) == 12

    upload(made("zarr")[0], "memory://kept/a.zarr")
    far = open_store("memory://kept/a.zarr", storage_options={"skip_instance_cache": True})
    again = pickle.loads(pickle.dumps(far))
    fsspec.filesystem("memory").rm("/kept", recursive=True)
    assert again.meta == fs.meta and again.source.options == {"skip_instance_cache": True}


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_closed_store_opens_again(made: Made, ext: str) -> None:
    fs = open_store(made(ext)[0])
    text, ids = fs[3].text, fs[3].token_ids
    fs.close()
    assert fs[3].text == text and (fs[3].token_ids == ids).all()


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_store_may_be_read_from_another_working_directory(
    made: Made, ext: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(ext)[0]
    monkeypatch.chdir(path.parent)
    expected = open_store(path.name)[7]
    fs = open_store(path.name)
    pickled = pickle.dumps(fs)
    (tmp_path / path.name).mkdir()  # the same name, but another folder
    monkeypatch.chdir(tmp_path)
    for store in (fs, pickle.loads(pickled), pickle.loads(pickle.dumps(fs))):
        assert store[7].text == expected.text
        assert (store[7].views[0].hidden["mean"] == expected.views[0].hidden["mean"]).all()
    assert str(fs.path) == path.name, "messages name the store as the user did"
    fs.to_parquet("table.parquet", columns="text")
    assert (path.parent / f".{path.name}.derived").exists()
