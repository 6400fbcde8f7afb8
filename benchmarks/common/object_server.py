"""A server of the reading half of S3 over a folder, in a process of its own: GET and HEAD of
objects and ranges of them, each answer delayed as by a far network, and all of them counted.

The bucket BUCKET is the folder. No key is checked: signatures are for servers that have secrets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
MISSING = b"<Error><Code>NoSuchKey</Code><Message>There is no such key.</Message></Error>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms after its headers
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if self.path == "/-/counts":
            self._whole(json.dumps(self.server.taken()).encode())
            return
        time.sleep(self.server.delay)
        file = self._file()
        try:
            with file.open("rb") as opened:
                self._send(opened, os.fstat(opened.fileno()))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self.server.count(requests=1)
            self._whole(MISSING, 404)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Set the delay, in seconds."""
        self.server.delay = float(self.rfile.read(int(self.headers["Content-Length"])))
        self._whole(b"")

    def _file(self) -> Path:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        return self.server.folder / name

    def _whole(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, opened: Any, about: os.stat_result) -> None:
        begin, end = 0, about.st_size
        if header := self.headers.get("Range"):
            first, _, last = header.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(0, end - int(last))
            end = min(end, int(last) + 1) if first and last else end
        self.send_response(206 if header else 200)
        if header:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{about.st_size}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", self.date_time_string(int(about.st_mtime)))
        self.send_header("ETag", f'"{about.st_mtime_ns:x}-{about.st_size:x}"')
        self.end_headers()
        body = 0 if self.command == "HEAD" else end - begin
        self.server.count(requests=1, bytes=body)
        if body:
            self.wfile.flush()
            self.connection.sendfile(opened, begin, body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.delay = folder, 0.0
        self._counts: Counter[str] = Counter()

    def count(self, **counts: int) -> None:
        self._counts.update(counts)

    def taken(self) -> dict[str, int]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {key: counts[key] for key in ("requests", "bytes")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client has closed the connection."""


class ObjectServer:
    """Holds a running server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def delay(self, seconds: float) -> None:
        """Delay every response from now on."""
        data = str(seconds).encode()
        self._opener.open(urllib.request.Request(f"{self.url}/-/delay", data, method="PUT"))

    def counts(self) -> dict[str, int]:
        """Return the requests and bytes since the last call."""
        counts: dict[str, int] = json.load(self._opener.open(f"{self.url}/-/counts"))
        return counts


@contextmanager
def serving(folder: Path) -> Iterator[ObjectServer]:
    """Serve a folder as a bucket; set the environment of this process and its children
    accordingly."""
    command = [sys.executable, "-m", "benchmarks.common.object_server", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    before = dict(os.environ)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        for proxy in PROXIES:
            os.environ.pop(proxy, None)
        os.environ.update(KEYS | {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url})
        yield ObjectServer(url)
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    server = _Server(Path(sys.argv[1]))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
