"""Stores at a web server: one is read in place, and an endless answer takes no more memory than the
range that was requested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation

from teachonce.store import StoreError, open_store
from teachonce.store.containers.zarr import files
from teachonce.store.tools.verify import verify

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
