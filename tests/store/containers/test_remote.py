"""Stores at an address, at a web server and on a hub are read in place.

- Stores at a web server: one is read in place, and an endless answer takes no more memory than the
  range that was requested.
- Zarr stores are read at their address; `test_network.py` reads them from an object server.
- A store on a hub is read without a download; the hub is a server on loopback.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any, cast

import pytest
from fsspec import register_implementation
from huggingface_hub import HfFileSystem

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import Batch, StoreError, StoreWriter, Unreachable, open_store
from teachonce.store.containers import network
from teachonce.store.containers.zarr import files
from teachonce.store.read.pool import Buffers, Pool
from teachonce.store.tools.copy import upload
from teachonce.store.tools.push import push
from teachonce.store.tools.verify import verify
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok, refused
from tests.hub_contents import Hub
from tests.hub_server import asked_by_this_process, serving
from tests.making.stores import Made
from tests.rough_network import KEYS
from tests.store.dying import Killed

SENT: list[int] = []


class Endless(BaseHTTPRequestHandler):
    """Send blocks until the client closes the connection, or 64 MB are sent."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        SENT.append(0)
        with suppress(OSError):
            while SENT[-1] < 2**26:
                self.wfile.write(b"[" * 2**16)
                SENT[-1] += 2**16

    def log_message(self, *words: Any) -> None:
        """Write nothing."""


class Quiet(SimpleHTTPRequestHandler):
    """Send files of a folder, without a log."""

    def log_message(self, *words: Any) -> None:
        """Write nothing."""


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/a.zarr"
    server.shutdown()
    server.server_close()


def test_a_store_at_a_web_server_is_read(small: Path) -> None:
    with served(partial(Quiet, directory=str(small.parent))) as url:
        assert verify(url).problems == []
        with open_store(url) as far, open_store(small) as near:
            assert list(far.texts()) == list(near.texts())


def test_a_missing_package_is_named() -> None:
    register_implementation("lacking", "no.such.module", errtxt="Lacking requires lackinglib")
    with pytest.raises(StoreError, match=r"lackinglib\); install what is missing with pip$"):
        open_store("lacking://a/b.zarr")


def test_an_endless_answer_is_read_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON", 2**16)
    SENT.clear()
    with (
        served(Endless) as url,
        pytest.raises(StoreError, match=r"zarr\.json is larger than 65,536 bytes"),
    ):
        open_store(url)
    assert 0 < max(SENT) < 2**25  # for one request: the limit, and the buffers of both sockets


def test_without_credentials_the_remedy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for key in (*KEYS, "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(key, raising=False)
    for key in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(key, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"endpoint_url": "http://127.0.0.1:9"}
    printed = r"s3://bucket/a.zarr: cannot be reached: .*credentials; .*AWS_ACCESS_KEY_ID"
    with pytest.raises(Unreachable, match=printed) as caught:
        open_store("s3://bucket/a.zarr", storage_options=options)
    assert "\n" not in str(caught.value)


def test_upload_makes_folders(made: Made, tmp_path: Path) -> None:
    upload(made("zarr")[0], url := f"file://{tmp_path}/new/a.zarr")
    assert verify(url).problems == []


def test_reading_and_verifying_from_memory(made: Made, memory: Any) -> None:
    path, parts = made("zarr")
    upload(path, "memory://held/a.zarr")
    fs = open_store("memory://held/a.zarr")
    assert [text for part in parts for text in part.texts] == list(fs.texts())
    assert verify("memory://held/a.zarr").problems == []
    memory.rm("/held/a.zarr/parts/1/token/id/c/0")
    found = "\n".join(verify("memory://held/a.zarr").problems)
    assert "part 1: array token/id cannot be read" in found


def test_later_pools_are_requested_when_the_first_is_read(
    made: Made, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = made("zarr")[0], list[str]()
    prefetch, read = Pool.prefetch, Pool.read

    def logged_prefetch(self: Pool) -> None:
        events.append("requested")
        prefetch(self)

    def logged_read(self: Pool, buffers: Buffers) -> None:
        read(self, buffers)
        events.append("read")

    def order(address: str | Path) -> list[list[int]]:
        with open_store(address) as fs:
            stream = fs.stream(1, blocks=fs.blocks(64), pool_blocks=1)
            return [batch.index.tolist() for batch in stream]

    near = order(path)
    upload(path, "memory://pools/a.zarr")
    monkeypatch.setattr(Pool, "prefetch", logged_prefetch)
    monkeypatch.setattr(Pool, "read", logged_read)
    assert order("memory://pools/a.zarr") == near
    assert events[:2] == ["requested", "read"]
    assert events.count("requested") == events.count("read") > 2


def test_a_stream_that_is_closed_early_reads_no_further_pool(
    made: Made, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, closed = Event(), Event()
    prefetched, reads = list[Pool](), list[Pool]()
    prefetch, read = Pool.prefetch, Pool.read

    def slow_prefetch(self: Pool) -> None:
        if prefetched:
            asking.set()
            assert closed.wait(60)
        prefetched.append(self)
        prefetch(self)

    def counted_read(self: Pool, buffers: Buffers) -> None:
        reads.append(self)
        read(self, buffers)

    upload(made("zarr")[0], "memory://early/a.zarr")
    monkeypatch.setattr(Pool, "prefetch", slow_prefetch)
    monkeypatch.setattr(Pool, "read", counted_read)
    with open_store("memory://early/a.zarr") as fs:
        stream = fs.stream(1, blocks=fs.blocks(64), pool_blocks=1)
        next(stream)
        assert asking.wait(60)
        names = ("read-ahead", "prefetch")  # a read that has not started is cancelled by `close`
        threads = [thread for thread in enumerate_threads() if thread.name.startswith(names)]
        cast("Generator[Batch]", stream).close()
        closed.set()
        for thread in threads:
            thread.join(60)
    assert len(prefetched) > len(reads) == 1


def test_a_server_that_lists_nothing(
    made: Made, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(made("zarr")[0], "memory://unlisted/a.zarr")
    monkeypatch.setattr(type(memory), "ls", lambda self, path, **how: [])
    monkeypatch.setattr(type(memory), "find", lambda self, path, **how: {})
    with pytest.raises(Unreachable, match="does not list its files; copy the store to a disk"):
        verify("memory://unlisted/a.zarr")


@pytest.mark.slow
def test_uploaded_it_is_sealed_only_when_it_is_whole(
    made: Made, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = made("zarr")[0], "memory://up/a.zarr"
    files = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    real, sent = type(memory).pipe_file, list[str]()

    def stop_at(number: int) -> Any:
        def pipe_file(self: Any, there: str, data: bytes, **settings: Any) -> None:
            sent.append(there)
            real(self, there, data[: len(data) // 2] if len(sent) == number else data, **settings)
            if len(sent) == number:
                raise Killed

        return pipe_file

    for number in (1, len(files) // 2, len(files) - 1):
        sent.clear()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(type(memory), "pipe_file", stop_at(number))
            upload(path, target)
        with pytest.raises(StoreError, match="no Zarr store"):
            open_store(target)
    ok(feature_store, "convert", path, target)
    assert verify(target).problems == []
    assert open_store(target).manifest.content() == open_store(path).manifest.content()
    for more in ((), ("--codec=small",)):
        refused(feature_store, "convert", path, target, *more)
    with pytest.raises(UserError, match="only a Zarr folder"):
        upload(made("h5")[0], target)
    for name in ("memory://up/a.h5", "memory://up/a", "memory://", "s3://a.zarr"):
        line = refused(feature_store, "convert", path, name)
        assert f"{name.rstrip('/')}: at a URL, a store needs a name, which must end in" in line


def test_a_file_that_does_not_arrive_whole_is_reported(
    made: Made, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(memory).pipe_file
    monkeypatch.setattr(
        type(memory), "pipe_file", lambda self, there, data: real(self, there, data[:-1])
    )
    with pytest.raises(StoreError, match="arrived incomplete; run the command again"):
        upload(made("zarr")[0], "memory://torn/a.zarr")
    with pytest.raises(StoreError, match="no Zarr store"):
        open_store("memory://torn/a.zarr")


def test_unknown_addresses(tmp_path: Path) -> None:
    for url in ("nowhere://a/b.zarr", f"zip://a.zarr::{tmp_path}/none.zip"):
        with pytest.raises(StoreError, match="cannot be opened .*; check the address"):
            open_store(url)
    for url in ("http://", "s3://", "memory:///"):
        with pytest.raises(StoreError, match="such as s3://bucket/store.zarr"):
            open_store(url)
    with pytest.raises(StoreError, match="check the address$"):  # it is not damaged
        open_store("memory://nothing/a.zarr")
    with pytest.raises(UserError, match="such as s3://bucket/store.zarr"):
        StoreWriter.check_writable("s3://store.zarr")


URL = "hf://datasets/user/what/a.zarr"


@pytest.fixture(scope="module")
def pushed_once(
    small: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hub, Path]]:
    """Serve a hub with a private store; return both."""
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        asked_by_this_process(hub, patch, tmp_path_factory.mktemp("home"))
        push(small, "user/what", private=True)
        yield hub, small


@pytest.fixture
def pushed(
    pushed_once: tuple[Hub, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Hub, Path]]:
    """Start with an empty client cache, and a server that answers."""
    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(network, "FIRST_PATIENCE", 0.3)
    yield pushed_once
    pushed_once[0].fails = {}
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
    pushed: tuple[Hub, Path], monkeypatch: pytest.MonkeyPatch
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
