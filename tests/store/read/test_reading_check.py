"""A stream that checks its data ends at damage that only the manifest can detect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from teachonce.store import StoreError, open_store
from tests.integrity.laundering import alter

NAMES = (
    "view1/logits/logprobs", "view1/hidden/mean/values", "view1/attention/mean/values",
    "view1/mask/action", "token/id", "text/utf8",
)  # fmt: skip


@pytest.fixture(params=["zarr", "h5"])
def path(request: pytest.FixtureRequest, copy: Callable[..., Path]) -> Path:
    return copy(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_checks_names_the_array(path: Path, name: str) -> None:
    alter(path, f"parts/1/{name}")
    store = open_store(path)
    assert sum(len(batch) for batch in store.stream(view=1)) == len(store)
    with pytest.raises(StoreError, match=f"part 1: {name} does not match its checksum"):
        list(store.stream(view=1, check=True))
    store.close()


def test_each_array_is_checked_once(path: Path) -> None:
    store = open_store(path)
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    store.close()
    alter(path, "parts/0/view1/logits/logprobs")
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    with pytest.raises(StoreError, match="does not match"):
        list(open_store(path).stream(view=1, check=True))


def test_what_is_not_read_is_not_checked(path: Path) -> None:
    alter(path, "parts/0/view1/logits/logprobs")
    store = open_store(path)
    assert len(list(store.stream(view=0, check=True)))
    assert len(list(store.stream(view=1, features=["hidden"], check=True)))
