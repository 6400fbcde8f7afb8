"""Responses of a hostile hub: each twist changes one response of `tests.hub_server`. `Hub.twists`
maps the start of a request to its twist."""

import gzip
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

Headers = Mapping[str, str]
LONG = 2**40  # bytes, or seconds
BLOCK = b"[" * 2**20


class Handler(Protocol):
    """Handles a request of `tests.hub_server`."""

    hub: Any
    path: str
    command: str
    wfile: Any
    send_response: Callable[..., None]
    send_header: Callable[..., None]
    end_headers: Callable[[], None]

    def send(self, status: int, headers: Headers, body: bytes) -> None: ...


Twist = Callable[[Handler, int, Headers, bytes], None]


def _sent(handler: Handler, status: int, headers: Headers, blocks: Iterator[bytes]) -> None:
    """Send headers unchanged, then send blocks until the client disconnects."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    with suppress(OSError):
        handler.end_headers()
        for block in blocks:
            handler.wfile.write(block)
            handler.wfile.flush()


def _forever(block: bytes, pause: float = 0.0) -> Iterator[bytes]:
    while True:
        yield block
        time.sleep(pause)


def _chunk(block: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(block), block)


def endless(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a body without a length and without an end."""
    blocks = _forever(_chunk(BLOCK))
    _sent(handler, status, {**headers, "Transfer-Encoding": "chunked"}, blocks)


def long(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Declare a length of a terabyte, and send blocks until the client disconnects."""
    _sent(handler, status, {**headers, "Content-Length": str(LONG)}, _forever(BLOCK))


def dense(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a body of 20 MB that unpacks to 20 GB."""
    block = gzip.compress(b" " * 2**24)
    changed = {**headers, "Content-Encoding": "gzip", "Content-Length": str(1200 * len(block))}
    _sent(handler, status, changed, iter([block] * 1200))


def short(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Declare a length that exceeds the body."""
    changed = {**headers, "Content-Length": str(len(body) + 100)}
    _sent(handler, status, changed, iter([body]))


def cut(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Declare a length below the body's."""
    changed = {**headers, "Content-Length": str(len(body) // 2)}
    _sent(handler, status, changed, iter([body]))


def drip(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a body slowly, byte by byte."""
    changed = {**headers, "Content-Length": str(len(body) + 10**6)}
    _sent(handler, status, changed, _forever(b" ", 0.1))


def drip_headers(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a header slowly, byte by byte."""
    with suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        for block in _forever(b"a", 0.1):
            handler.wfile.write(block)
            handler.wfile.flush()


def silence(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send nothing."""
    time.sleep(60)


def circle(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Redirect to the same address."""
    address = handler.hub.address + handler.path
    handler.send(307, {"Location": address}, b"")


def to_file(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Redirect to a file of the client's machine."""
    handler.send(307, {"Location": "file:///etc/passwd"}, b"")


def wait(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Request a retry after years."""
    handler.send(429, {"Retry-After": str(LONG)}, b"")


def outside(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send names that lead out of the client's cache."""
    name = "../../../../../outside"
    changed = {**headers, "ETag": f'"{name}"', "X-Linked-Etag": f'"{name}"'}
    handler.send(status, changed, body)


def commit_outside(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a commit whose name leads out of the client's cache."""
    handler.send(status, {**headers, "X-Repo-Commit": "../../../../../outside"}, body)


def none_outside(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a missing file in a commit whose name leads out of the client's cache."""
    changed = {"X-Repo-Commit": "../../../../../outside", "X-Error-Code": "EntryNotFound"}
    handler.send(404, changed, b"")


def pages(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send an empty page of a list, and the link to the next."""
    url = handler.hub.address + handler.path
    handler.send(200, {"Link": f'<{url}>; rel="next"'}, b"[]")


def moved_pages(handler: Handler, status: int, headers: Headers, body: bytes) -> None:
    """Send a hundred empty pages, each with a link to the next."""
    base, _, number = handler.path.partition("?")[0].partition("/page")
    url = f"{handler.hub.address}{base}/page{int(number or 0) + 1}"
    handler.send(200, {"Link": f'<{url}>; rel="next"'} if number != "99" else {}, b"[]")


def wrong_shapes() -> dict[str, Twist]:
    """Send JSON of an unexpected shape, deeply nested JSON, and invalid JSON."""
    bodies = {
        "list": b"[1]", "null": b"null", "number": b"7", "nested": b"[" * 10**5,
        "no JSON": b"<html>", "nothing": b"", "object": b'{"id": 3, "sha": {}, "siblings": 1}',
        "names": b'[{"type": "file", "path": "../../outside", "oid": "a", "size": -1}]',
        "sizes": b'[{"type": "file", "path": [], "oid": null, "size": "many"}]',
    }  # fmt: skip

    def twist(data: bytes) -> Twist:
        return lambda handler, status, headers, body: handler.send(200, headers, data)

    return {name: twist(data) for name, data in bodies.items()}


ANSWERS: dict[str, Twist] = {
    twist.__name__: twist
    for twist in (
        *(endless, long, dense, short, cut, drip, drip_headers, silence),
        *(circle, to_file, wait, outside, commit_outside, none_outside, pages, moved_pages),
    )
} | wrong_shapes()
"""All twists, by their names."""
