"""Requests and bytes a second of the clients of buckets, obstore and s3fs, on a loopback server."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any

import click

SIZES = {"16 KiB": 2**14, "1 MiB": 2**20}
AT_ONCE = 32


class _Ranges(BaseHTTPRequestHandler):
    """Answers every request for a range with as many zeros: no other part of S3 is needed."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms behind its headers
    zeros = bytes(max(SIZES.values()))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        size = int(end) - int(begin) + 1
        self.send_response(206)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Range", f"bytes {begin}-{end}/{2**30}")
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.write(self.zeros[:size])


Read = Callable[[int], Awaitable[Any]]


def _obstore(url: str) -> Read:
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", endpoint=url, client_options={"allow_http": True})
    return lambda size: obstore.get_range_async(store, "key", start=0, length=size)


def _s3fs(url: str) -> Read:
    import s3fs  # type: ignore[import-not-found, import-untyped, unused-ignore]

    fs = s3fs.S3FileSystem(endpoint_url=url, asynchronous=True, skip_instance_cache=True)
    return lambda size: fs._cat_file("bucket/key", start=0, end=size)


CLIENTS = {"obstore": _obstore, "s3fs": _s3fs}


async def _measured(read: Read, size: int, count: int) -> tuple[float, float]:
    """Seconds, and seconds of this process's CPU, of `count` reads, AT_ONCE at a time."""
    left = iter(range(count))

    async def reader() -> None:
        for _ in left:
            await read(size)

    await read(size)  # connects
    begun, used = time.perf_counter(), _cpu()
    await asyncio.gather(*(reader() for _ in range(AT_ONCE)))
    return time.perf_counter() - begun, _cpu() - used


def _cpu() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


@click.command(help=__doc__)
@click.option("--count", default=2000, show_default=True, help="Requests for each row.")
def main(count: int) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    os.environ.update(keys | {"AWS_REGION": "us-east-1"})
    read_end, write_end = socket.socketpair()
    if not (child := os.fork()):  # a process of its own, so that its CPU is not counted
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Ranges)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_end.send(str(server.server_address[1]).encode())
        write_end.recv(1)
        os._exit(0)
    with closing(write_end), closing(read_end):
        url = f"http://127.0.0.1:{read_end.recv(16).decode()}"
        names = ", ".join(f"{name} {version(name)}" for name in CLIENTS)
        click.echo(f"{names}, Python {platform.python_version()}, {AT_ONCE} requests at once")
        click.echo("| client | bytes a request | requests/s | MB/s | CPU a request, ms |")
        click.echo("|---|---|---|---|---|")
        for told, size in SIZES.items():
            number = count if size < 2**20 else count // 4
            for name, client in CLIENTS.items():
                seconds, cpu = asyncio.run(_reading(client, url, size, number))
                click.echo(
                    f"| {name} | {told} | {number / seconds:,.0f} |"
                    f" {number * size / seconds / 1e6:,.0f} | {cpu / number * 1000:.2f} |"
                )
        read_end.send(b"x")
    os.waitpid(child, 0)


async def _reading(
    client: Callable[[str], Read], url: str, size: int, count: int
) -> tuple[float, float]:
    return await _measured(client(url), size, count)


if __name__ == "__main__":
    main()
