"""A stream that checks what it reads: damage that only the manifest can tell ends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from teachonce.store import StoreError, open_store
from tests.integrity.laundering import alter
from tests.store.conftest import Made

NAMES = (
    "view1/logits/logprobs",
    "view1/hidden/mean/values",
    "view1/attention/mean/values",
    "view1/mask/action",
    "token/id",
    "text/utf8",
)


@pytest.fixture(params=["zarr", "h5"])
def copy(request: pytest.FixtureRequest, made: Callable[..., Made], tmp_path: Path) -> Path:
    source, target = made(request.param)[0], tmp_path / f"copy.{request.param}"
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_checks_names_the_array(copy: Path, name: str) -> None:
    alter(copy, f"parts/1/{name}")
    store = open_store(copy)
    assert sum(len(batch) for batch in store.stream(view=1)) == len(store)
    with pytest.raises(StoreError, match=f"part 1: {name} does not match its checksum"):
        list(store.stream(view=1, check=True))
    store.close()


def test_each_array_is_checked_once(copy: Path) -> None:
    store = open_store(copy)
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    store.close()
    alter(copy, "parts/0/view1/logits/logprobs")
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    with pytest.raises(StoreError, match="does not match"):
        list(open_store(copy).stream(view=1, check=True))


def test_what_is_not_read_is_not_checked(copy: Path) -> None:
    alter(copy, "parts/0/view1/logits/logprobs")
    store = open_store(copy)
    assert len(list(store.stream(view=0, check=True)))
    assert len(list(store.stream(view=1, features=["hidden"], check=True)))
