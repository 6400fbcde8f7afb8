"""An open store goes into other processes: forked ones, and spawned ones by its path."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest

from store import FeatureStore, open_store

Made = Callable[..., Any]


def read_all(fs: FeatureStore, queue: Any) -> None:
    queue.put([batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)])


def read_path(path: str, queue: Any) -> None:
    read_all(open_store(path), queue)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_other_processes_read_the_same(made: Made, ext: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    fs = open_store(made(ext)[0])
    expected = [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)]
    queue = context.Queue()
    process = (
        context.Process(target=read_all, args=(fs, queue))
        if method == "fork"
        else context.Process(target=read_path, args=(str(made(ext)[0]), queue))
    )
    process.start()
    assert queue.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0
    assert [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)] == expected


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_closed_store_opens_again(made: Made, ext: str) -> None:
    fs = open_store(made(ext)[0])
    text, ids = fs[3].text, fs[3].token_ids
    fs.close()
    assert fs[3].text == text and (fs[3].token_ids == ids).all()
