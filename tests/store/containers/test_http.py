"""If an http:// server sends an endless answer, a read takes no more memory than its range."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.containers.zarr import files

pytest.importorskip("aiohttp")
pytest.importorskip("requests")
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


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/a.zarr"
    server.shutdown()
    server.server_close()


def test_an_endless_answer_is_read_to_its_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON", 2**16)
    SENT.clear()
    with pytest.raises(StoreError, match=r"zarr\.json is larger than 65,536 bytes"):
        open_store(url)
    assert 0 < max(SENT) < 2**25  # for one request: the limit, and the buffers of both sockets
