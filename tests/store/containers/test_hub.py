"""A store on a hub is read without a download; the hub is a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem

from teachonce.store import StoreError, Unreachable, open_store
from teachonce.store.containers import network
from teachonce.store.tools.push import push
from teachonce.store.tools.verify import verify
from tests.hub_contents import Hub
from tests.hub_server import asked_by_this_process, serving

URL = "hf://datasets/user/what/a.zarr"


@pytest.fixture(scope="module")
def pushed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Path]]:
    """Serve a hub with a private store; return both."""
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        asked_by_this_process(hub, patch, tmp_path_factory.mktemp("home"))
        push(small, "user/what", private=True)
        yield hub, small


@pytest.fixture(autouse=True)
def fresh(
    pushed: tuple[Hub, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Start with an empty client cache, and a server that answers."""
    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(network, "FIRST_PATIENCE", 0.3)
    yield
    pushed[0].fails = {}
    HfFileSystem.clear_instance_cache()


def test_a_store_on_the_hub_is_read_where_it_lies(pushed: tuple[Hub, Path]) -> None:
    local, there = open_store(pushed[1]), open_store(URL)
    assert there.meta == local.meta and len(there) == len(local)
    assert there[7].text == local[7].text
    assert (there[7].views[0].hidden["mean"] == local[7].views[0].hidden["mean"]).all()
    ours, theirs = (list(each.stream(batch_tokens=300, seed=1)) for each in (local, there))
    assert [batch.index.tolist() for batch in ours] == [batch.index.tolist() for batch in theirs]
    pinned = open_store(URL.replace("what", "what@main"))
    assert pinned.manifest.content() == local.manifest.content()


@pytest.mark.apart
def test_verify_reads_a_store_on_the_hub(pushed: tuple[Hub, Path]) -> None:
    report = verify(URL)
    assert not report.problems and report.parts == len(open_store(pushed[1]).manifest.parts)


def test_what_is_not_there_is_reported(
    pushed: tuple[Hub, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="no Zarr store at this address"):
        open_store("hf://datasets/user/what/b.zarr")
    with pytest.raises(StoreError, match="no Zarr store at this address"):
        open_store("hf://datasets/user/nothing/a.zarr")
    pushed[0].fails = {"GET /datasets": 403, "HEAD /datasets": 403}
    with pytest.raises(Unreachable, match=r"HTTP 403.*hf auth login"):
        open_store(URL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match="HF_HUB_OFFLINE"):
        open_store(URL)
