"""Bounds what a hub may send to the client of huggingface_hub: bytes, time, names and pages.

The client itself has no such bounds: it reads responses of any size for any time, waits for any
Retry-After, and joins the names in ETag and X-Repo-Commit unchecked to the path of its cache.
"""

from __future__ import annotations

import contextvars
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError
from teachonce.support.parsing import whole_number

MAX_ANSWER = 2**26  # bytes of an answer that is read into memory: lists of files, metadata
MAX_UNDECLARED = 2**30  # bytes of a file that comes without its length
ANSWER_SECONDS, SLOWEST = 60.0, 2**16  # time limit of an answer, plus 1 s per SLOWEST bytes
MAX_WAIT = 300.0  # seconds: longest accepted Retry-After, as of a rate limit
MAX_PAGES, PAGES_SECONDS = 1000, 600.0  # limits of a list; a page has 1,000 files
RANGE = re.compile(r"bytes=(\d*)-(\d+)")
COMMIT = re.compile(r"\w[\w.-]*")
NAMES = ("etag", "x-linked-etag")  # headers whose values become file names in the cache
Response = Any  # of httpx or httpx2, by the version of huggingface_hub


def bound_hub_client() -> None:
    """Make huggingface_hub use bounded clients in this process. Their settings are those of the
    client factory that is set, by the caller or by default."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    # huggingface_hub has a function that sets the factory, and none that returns it.
    factory = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    if not isinstance(factory, _Factory):
        set_client_factory(_Factory(factory))


class _Factory:
    """Makes HTTP clients whose responses are bounded."""

    def __init__(self, inner: Callable[[], Any]) -> None:
        self._inner = inner

    def __call__(self) -> Any:
        client = self._inner()
        hooks, lists = client.event_hooks, _Lists()
        client.event_hooks = {
            "request": [*hooks["request"], _prepare],
            "response": [*hooks["response"], lists.check, _check],
        }
        send = client.send

        # An instance's method is replaced: a transport would lose the environment's proxies.
        def bounded_send(request: Any, *, stream: bool = False, **options: Any) -> Response:
            request.extensions["streamed"] = stream
            # Always as a stream: `_in_time` bounds the time until the headers, and the body is read
            # below, within a bound that grows with its size.
            response = _in_time(request, lambda: send(request, stream=True, **options))
            if not stream:
                try:
                    response.read()
                finally:
                    response.close()
            return response

        client.send = bounded_send
        return client


def _in_time(request: Any, send: Callable[[], Response]) -> Response:
    """Return a response after its headers have arrived, redirects included.

    Raises UserError if they take too long.
    """
    # A socket's timeout starts again with each byte, so headers could take years. Instead, a thread
    # sends the request, and is abandoned after the limit.
    responses: list[Response] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            responses.append(send())
        except BaseException as error:
            failed.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), daemon=True)
    thread.start()
    sent = int(request.headers.get("Content-Length") or 0)
    limit = ANSWER_SECONDS + sent / SLOWEST
    thread.join(limit)
    if failed:
        # huggingface_hub would send the request five times.
        if type(failed[0]).__name__ == "TooManyRedirects":
            raise _refused(request, "redirects endlessly") from failed[0]
        raise failed[0]
    if not responses:
        raise _refused(request, f"sends no answer within {limit:.0f} s")
    return responses[0]


def _refused(request: Any, problem: str) -> UserError:
    return UserError(
        f"{request.url}: the hub {problem}; check HF_ENDPOINT and the network, and run the same"
        " command again later"
    )


def _prepare(request: Any) -> None:
    """Request an uncompressed response, and set the timeouts that a caller left out."""
    # A few packed bytes can unpack to gigabytes, which no declared length shows.
    request.headers["Accept-Encoding"] = "identity"
    timeouts = request.extensions.get("timeout") or {}
    for key in ("connect", "read", "write", "pool"):
        if timeouts.get(key) is None:
            timeouts[key] = ANSWER_SECONDS
    request.extensions["timeout"] = timeouts


class _Lists:
    """Limits the number of pages and the time of each list of files: a hub could send empty pages
    that name themselves as the next page, without end."""

    def __init__(self) -> None:
        # By the address of a next page: the number of pages before this page, and the time of the
        # first page of its list.
        self._next: dict[str, tuple[int, float]] = {}

    def check(self, response: Response) -> None:
        # A request continues a list if the previous page has named its address. So a list that was
        # read in part can be read again, and a hub cannot restart the count by other addresses,
        # errors or slow pages.
        url, now = response.request.url, time.monotonic()
        pages, first = self._next.get(str(url), (0, now))
        if "next" in response.links:
            pages, address = pages + 1, response.links["next"]["url"]
        elif pages and response.has_redirect_location:
            address = response.headers["Location"]
        else:
            if response.is_success:
                self._next.pop(str(url), None)
            return
        self._next[str(url.join(address))] = pages, first
        if pages > MAX_PAGES or now - first > PAGES_SECONDS:
            total = f"{pages:,} pages in {now - first:.0f} s"
            raise _refused(response.request, f"sends a list that is too long or too slow ({total})")


def _check(response: Response) -> None:
    """Raise UserError for a response with invalid headers, and bound its body."""
    request, headers = response.request, response.headers
    wait = headers.get("Retry-After", "")
    seconds = whole_number(wait)
    # The client waits for a number of seconds, and ignores dates. `seconds` is None if the number
    # has too many digits.
    if wait.isdecimal() and (seconds is None or seconds > MAX_WAIT):
        raise _refused(request, f"requests a pause of {wait:.20} s (HTTP {response.status_code})")
    if request.method == "HEAD":
        for name in NAMES:
            _check_name(response, name, lambda value: value not in (".", "..") and "/" not in value)
    _check_name(response, "x-repo-commit", lambda value: bool(COMMIT.fullmatch(value)))
    if request.method == "HEAD":
        return
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refused(request, "sends compressed bytes, which were not requested")
    declared = whole_number(headers.get("Content-Length", ""))
    limit = _most(response, declared)
    if declared is not None and declared > limit:
        raise _refused(request, f"sends {declared:,} bytes, expected at most {limit:,}")
    response.stream = _bounded(response, limit)


def _check_name(response: Response, header: str, fits: Callable[[str], bool]) -> None:
    value = response.headers.get(header)
    if value is not None and not fits(value.removeprefix("W/").strip('"')):
        raise _refused(response.request, f"sends {value:.80} as its {header}, which is not a name")


def _most(response: Response, declared: int | None) -> int:
    """Return the largest size in bytes that a response may have."""
    request = response.request
    if response.status_code >= 300 or not request.extensions.get("streamed"):
        # Errors, and responses that were not requested as a stream, are read into memory.
        part = RANGE.fullmatch(request.headers.get("Range", ""))
        if part and response.status_code < 300:
            return int(part[2]) - int(part[1]) + 1 if part[1] else int(part[2])
        return MAX_ANSWER
    return MAX_UNDECLARED if declared is None else min(declared, _free())


def _free() -> int:
    """Return how many bytes may be written to the disk of the cache: the free bytes minus 1 GiB."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    return max(0, shutil.disk_usage(folder).free - 2**30)


def _bounded(response: Response, limit: int) -> Any:
    """Wrap the body of a response. Reading it raises UserError after `limit` bytes, or if it
    arrives more slowly than SLOWEST bytes per second."""
    inner, request = response.stream, response.request
    # httpx checks the type of a stream; huggingface_hub 2 brings httpx2, 1 brings httpx.
    library = sys.modules[type(response).__module__.partition(".")[0]]

    class Bounded(library.SyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            count, first = 0, time.monotonic()
            for block in inner:
                count += len(block)
                if count > limit:
                    raise _refused(request, f"sends more than {limit:,} bytes")
                if (seconds := time.monotonic() - first) > ANSWER_SECONDS + count / SLOWEST:
                    raise _refused(request, f"sends too slowly: {count:,} bytes in {seconds:.0f} s")
                yield block

        def close(self) -> None:
            inner.close()

    return Bounded()
