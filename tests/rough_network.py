"""An S3 server on loopback, and a proxy in front of it that injects network faults."""

import http.client
import logging
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

BUCKET = "bucket"
REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": REGION}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
# S3's own error responses: status, code, message.
ANSWERS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "429": (429, "TooManyRequests", "Too many requests."),
    "403": (403, "AccessDenied", "Access Denied"),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "skewed": (403, "RequestTimeTooSkewed", "The difference between the times is too large."),
    "unknown key": (403, "InvalidAccessKeyId", "The Access Key Id does not exist."),
    "redirect": (301, "PermanentRedirect", "The bucket must be addressed by another endpoint."),
    "region": (400, "AuthorizationHeaderMalformed", "the region is wrong; expecting 'eu-west-1'"),
    "404": (404, "NoSuchKey", "The specified key does not exist."),
    "full": (400, "QuotaExceeded", "The quota of the bucket has been exceeded."),
    "conditional": (501, "NotImplemented", "A header implies what is not implemented."),
}
XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
PAGE = b"<!doctype html><html><body>Please log in.</body></html>"
Answer = tuple[int, list[tuple[str, str]], bytes, str | None]  # the last: a length without a body
HOP = {"connection", "transfer-encoding", "content-length", "server", "date", "keep-alive"}


@dataclass
class Weather:
    """Sets the faults by their share of all requests; `strikes` selects requests.

    A fault is a key of ANSWERS, or "reset" (before the server has it), "lost" (the server has it,
    and its answer does not come), "torn" (a reset in the middle of
    the body), "truncated" (the body ends early), "short" (and its length is declared so), "whole"
    (Range is ignored), "page" (a web page with status 200, as a login sends it), "flipped" (a bit),
    "unmatched" (a bit, and the server's checksum of the body comes with it), "slow" (the body
    comes in drops), or "stalled" (nothing comes).
    """

    faults: dict[str, float] = field(default_factory=dict)
    strikes: Callable[[str, str], bool] = lambda method, path: True
    seed: int = 0
    drop: float = 0.01  # seconds between the drops of a slow body
    stall: float = 1.0
    conditions: str = ""  # of a write: "ignored", or "refused" as by an old server
    delay: float = 0.0  # seconds of delay before each response
    most: int = 0  # requests that were under way at once
    met: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance, self._lock = random.Random(self.seed), threading.Lock()
        self._under_way = 0

    @contextmanager
    def way(self) -> Iterator[None]:
        """Transfers a request and its response."""
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            time.sleep(self.delay)
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def fault(self, method: str, path: str) -> tuple[str, random.Random]:
        """Choose the fault for a request ("" for none), and the random number that places the
        fault."""
        with self._lock:
            draw, inner = self._chance.random(), random.Random(self._chance.random())
            self.met["requests"] += 1
            for name, share in self.faults.items() if self.strikes(method, path) else ():
                draw -= share
                if draw < 0:
                    self.met[name] += 1
                    return name, inner
        return "", inner


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms after its headers
    server: "_Proxy"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _all(self) -> None:
        body = self._body()
        with self.server.weather.way():
            self._answered(body)

    def _answered(self, body: bytes) -> None:
        fault, chance = self.server.weather.fault(self.command, self.path)
        conditions = self.server.weather.conditions
        if conditions and self.command == "PUT":
            names = [name for name in self.headers if name.lower() in ("if-match", "if-none-match")]
            for name in names:
                del self.headers[name]
            fault = "conditional" if names and conditions == "refused" else fault
        if fault == "reset":
            self._reset()
        elif fault == "lost":
            self._answer(body)
            self._reset()
        elif fault == "stalled":
            time.sleep(self.server.weather.stall)
            self._reset()
        elif fault == "page":
            self._send(200, [("Content-Type", "text/html")], PAGE)
        elif fault in ANSWERS:
            status, code, message = ANSWERS[fault]
            region = [("x-amz-bucket-region", "eu-west-1")] if status == 301 else []
            self._send(status, region, XML.format(code, message).encode())
        else:
            self._forward(body, fault, chance)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _all

    def _body(self) -> bytes:
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reset(self) -> None:
        """Close with RST instead of FIN."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()

    def _forward(self, body: bytes, fault: str, chance: random.Random) -> None:
        if fault == "whole":
            del self.headers["Range"]
        status, headers, content, length = self._answer(body)
        data = bytearray(content)
        if fault in ("flipped", "short"):
            headers = [(k, v) for k, v in headers if not k.lower().startswith("x-amz-checksum")]
        if fault in ("flipped", "unmatched") and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if fault == "short" and self.command != "HEAD":
            data = data[: len(data) // 2]
        self._send(status, headers, bytes(data), fault, length)

    def _answer(self, body: bytes) -> Answer:
        """Fetch the server's response. It is slow, so responses are cached."""
        read = self.command in ("GET", "HEAD")
        key = (self.command, self.path, self.headers.get("Range"))
        if read and (cached := self.server.cache.get(key)):
            return cached
        with closing(http.client.HTTPConnection(*self.server.upstream, timeout=60)) as upstream:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            received = [(k, v) for k, v in answer.getheaders() if k.lower() not in HOP]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        result = answer.status, received, data, length
        if read:
            self.server.cache[key] = result
        else:
            self.server.cache.clear()
        return result

    def _send(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        fault: str = "",
        length: str | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("torn", "truncated"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault == "torn":
                self._reset()
        elif fault == "slow":
            for begin in range(0, len(body), max(1, len(body) // 10)):
                self.wfile.write(body[begin : begin + max(1, len(body) // 10)])
                self.wfile.flush()
                time.sleep(self.server.weather.drop)
        else:
            self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client closed the connection, or it was reset
            self.close_connection = True

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.connection.close()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.weather = upstream, Weather()
        self.cache: dict[tuple[str, str, str | None], Answer] = {}

    def shutdown_request(self, request: Any) -> None:
        with suppress(OSError):
            super().shutdown_request(request)


class S3:
    """Runs a server with one bucket; `weather` may be set at any time."""

    def __init__(self, proxy: _Proxy, client: Any) -> None:
        self._proxy, self._client = proxy, client
        self.url = f"http://127.0.0.1:{proxy.server_address[1]}"
        self.options: dict[str, Any] = {
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": REGION},
        }

    def put(self, folder: Path, name: str) -> None:
        """Put the files of a folder into the bucket."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.write(f"{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data)
        self._proxy.cache.clear()

    def read(self, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)
        self._proxy.cache.clear()

    def held(self) -> set[str]:
        """Keys of all objects."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {item["Key"] for page in pages for item in page.get("Contents", ())}

    def clear(self) -> None:
        """Remove all objects."""
        if keys := [{"Key": key} for key in self.held()]:
            self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
            self._proxy.cache.clear()

    @property
    def weather(self) -> Weather:
        return self._proxy.weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._proxy.weather = weather


@contextmanager
def running_s3() -> Iterator[S3]:
    """Run both on free ports of loopback, and set the environment variables that clients read."""
    import boto3  # type: ignore[import-untyped]
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    clean = {key: value for key, value in os.environ.items() if key not in PROXIES}
    with mock.patch.dict(os.environ, clean | KEYS, clear=True):
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        host, port = moto.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name=REGION)
        reset = http.client.HTTPConnection(host, port, timeout=60)
        reset.request("POST", "/moto-api/reset")  # all servers of a process share their contents
        reset.getresponse().read()
        client.create_bucket(Bucket=BUCKET)
        proxy = _Proxy((host, port))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        s3 = S3(proxy, client)
        os.environ["AWS_ENDPOINT_URL"] = s3.url
        try:
            yield s3
        finally:
            proxy.shutdown()
            proxy.server_close()
            moto.stop()
