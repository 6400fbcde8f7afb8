"""Send requests over a network: retry transient errors, and explain permanent ones."""

# obstore could retry requests itself: of 240 requests, 30 % of which met a 503, a reset or a torn
# body, all were answered. `Retrier` also serves the clients of fsspec, and logs what it waits for.
# It gives up after 20 s on an address that has never answered; obstore has no setting for this.

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from teachonce.store.errors import MissingStore, StoreError, Unreachable
from teachonce.support.console import counted
from teachonce.support.errors import UserError, first_line
from teachonce.support.redaction import redacted

Result = TypeVar("Result")

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 20.0  # seconds; the pause doubles from try to try
PATIENCE = 300.0  # seconds of retries to an address that has answered before
FIRST_PATIENCE = 20.0  # seconds for an address that never has: it may be wrong
ANSWER_SECONDS, SLOWEST = 60.0, 2**16  # timeout of an answer: seconds, plus bytes / SLOWEST
QUIET = 5.0  # seconds of failure before a line is logged, and between two lines
FETCHES = 4  # attempts before bytes that look damaged, or are too few, count as damage

PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
PASSING_CODES = {  # of S3; by its HTTP status, some would count as permanent
    "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
    "OperationAborted", "InternalError", "ServiceUnavailable", "SlowDown", "Throttling",
}  # fmt: skip
# Modules of HTTP clients. Their errors mean, as OSError does, that no response or only a part of it
# was received. The modules are optional and not imported here.
CLIENTS = {"aiohttp", "http", "urllib3"}
CREDENTIALS = "the credentials (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
WHOLE_REMEDY = (
    "the server, or a proxy in between, does not send the requested ranges of objects: read the"
    " store from another server, or copy it to a local disk"
)
HUB_REMEDY = (
    "check the name, and `hf auth login` or HF_TOKEN; with HF_HUB_OFFLINE no request is sent"
)
REMEDIES = {
    **dict.fromkeys(
        ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"),
        "the credentials have expired: renew them, and run the same command again",
    ),
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled", "AccountProblem"),
        f"these credentials do not permit this: check {CREDENTIALS} and the permissions of the"
        " bucket",
    ),
    **dict.fromkeys(
        ("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
         "IllegalLocationConstraintException"),
        "the bucket is in another region: set AWS_REGION, or AWS_ENDPOINT_URL, to the bucket's",
    ),
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "NoSuchBucket": "there is no such bucket: check its name, or create it",
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
         "InsufficientCapacity"),
        "the bucket is full: free some space, and run the same command again",
    ),
}  # fmt: skip
OF_STATUS = {
    301: REMEDIES["PermanentRedirect"],
    307: REMEDIES["PermanentRedirect"],
    400: f"check {CREDENTIALS}, whether they have expired, and the region of the bucket",
    401: f"check {CREDENTIALS}",
    403: REMEDIES["AccessDenied"],
    405: REMEDIES["AccessDenied"],
    507: REMEDIES["QuotaExceeded"],
}
BARE_REDIRECT = "redirect without LOCATION"  # in obstore's message if S3 names no address


class HttpAnswer(NamedTuple):
    """Holds the error response of a server: HTTP status, and the server's own code and message (""
    if it sent none)."""

    status: int
    code: str
    message: str


# Not an OSError, so `Retrier` never repeats it: each try would download the whole object, 26 times
# in five minutes.
class RangeIgnored(Exception):
    """Raised if a server sent a whole object although a range of its bytes was requested."""


class WrongLength(OSError):
    """Raised if a server sent more or fewer bytes than were requested."""


def http_answer(error: BaseException) -> HttpAnswer | None:
    """Return the server's response that a client's error quotes; None if the server did not
    respond."""
    if _module(error) == "obstore" or isinstance(error, FileNotFoundError):
        return _of_obstore(str(error))
    # Errors of aiohttp have the status; errors of the hub's client have a `response`. The cause of
    # an error is not searched: it may have a status that no server sent.
    answered = getattr(error, "response", None) or error
    for key in ("status", "status_code", "code"):
        status = getattr(answered, key, None)
        if isinstance(status, int) and 300 <= status < 600:
            return HttpAnswer(status, "", first_line(error))
    return None


def _module(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _of_obstore(text: str) -> HttpAnswer | None:
    if BARE_REDIRECT in text:
        return HttpAnswer(301, "PermanentRedirect", "no address was given")
    # The errors of obstore have no field for the status, but their text quotes the response.
    status = re.search(r"status code: (\d{3})", text)
    if status is None:
        return None
    code, message = (
        re.search(f"<{key}>(.*?)</{key}>", text, re.DOTALL) for key in ("Code", "Message")
    )
    return HttpAnswer(int(status[1]), code[1] if code else "", message[1] if message else "")


def check_body_length(name: str, data: Sized, expected: int, whole: int) -> None:
    """Raise RangeIgnored or WrongLength unless `data` has `expected` bytes. `whole` is the size of
    the whole object."""
    if len(data) == expected:
        return
    if len(data) == whole:
        raise RangeIgnored("the server ignores Range and sends whole objects")
    raise WrongLength(f"received {len(data):,} bytes of {name}, expected {expected:,}")


def check_root_metadata(path: str, file: str, data: bytes | None) -> None:
    """Raise MissingStore if the root of a store is missing, and Unreachable for a web page.

    A proxy or login page answers any request with status 200 and HTML.
    """
    if data is None and file == "zarr.json":
        raise MissingStore(
            f"{path}: no Zarr store at this address (zarr.json is missing); check the address"
        )
    if data is not None and data.lstrip()[:1] == b"<":
        raise Unreachable(
            f"{path}: cannot be reached: {file}: the server sent a web page instead of a file of"
            f" the store; check the address, {CREDENTIALS}, and whether a proxy or a login page is"
            " in between"
        )


def is_transient(error: BaseException) -> bool:
    """Return whether an error may be transient, so that the request is worth repeating."""
    # The status decides before the class: the hub's client raises an OSError for refusals, too.
    if answer := http_answer(error):
        return answer.status in PASSING_STATUS or answer.code in PASSING_CODES
    kind = type(error).__name__
    if isinstance(error, OSError):  # the hub's OfflineModeIsEnabled is one, too
        return not isinstance(error, PermissionError) and kind != "OfflineModeIsEnabled"
    return kind == "GenericError" if _module(error) == "obstore" else _module(error) in CLIENTS


def _described(error: BaseException) -> str:
    """Describe an answer or error in a few words."""
    if isinstance(error, RangeIgnored | WrongLength):
        return str(error)
    answer = http_answer(error)
    if answer is None:
        name = type(error).__name__
        line = first_line(error)
        return line if line.startswith(name) else f"{name}: {line}"
    code = "" if answer.code in ("", str(answer.status)) else f" {answer.code}"
    message = " ".join(answer.message.split())[:200].rstrip(".")
    return f"HTTP {answer.status}{code}" + (f" ({message})" if message else "")


def _remedy(error: BaseException) -> str:
    if isinstance(error, RangeIgnored | WrongLength):
        return WHOLE_REMEDY
    if _module(error) == "huggingface_hub":
        return HUB_REMEDY
    if answer := http_answer(error):
        remedy = REMEDIES.get(answer.code) or OF_STATUS.get(answer.status)
        if remedy:
            return remedy
    if isinstance(error, PermissionError):
        return OF_STATUS[403]
    return f"check the address, the network and {CREDENTIALS}"


@dataclass
class Retrier:
    """Sends requests to the URL of a store, and retries transient errors."""

    url: str  # for messages, without a password
    answered: bool = False
    logged: float = 0.0

    def __post_init__(self) -> None:
        self.url = redacted(self.url)

    @property
    def patience(self) -> float:
        return PATIENCE if self.answered else FIRST_PATIENCE

    async def send(
        self, target: str, request: Callable[[], Awaitable[Result]], size: int | None = 0
    ) -> Result:
        """Send a request for `target` until it is answered, with exponential backoff.

        The timeout of an answer grows with its `size` in bytes; None: no timeout. Raises
        Unreachable if no answer came in time, and at once for an error that is not transient.
        Raises FileNotFoundError at once, as a missing object is an answer.
        """
        started, tries, wrong_lengths = time.monotonic(), 0, 0
        limit = None if size is None else ANSWER_SECONDS + size / SLOWEST
        while True:
            tries += 1
            try:
                async with asyncio.timeout(limit):
                    result = await request()
                self.answered = True
                return result
            except ABSENT as error:
                self.answered = True
                # A missing bucket is a FileNotFoundError, too, but is not a missing object.
                if (answer := http_answer(error)) and answer.code == "NoSuchBucket":
                    raise self._refused(target, error) from error
                raise
            except Exception as error:  # every client raises its own
                wrong_lengths += isinstance(error, WrongLength)
                # Otherwise a server that always sends a wrong length would be retried for PATIENCE.
                if not is_transient(error) or wrong_lengths == FETCHES:
                    raise self._refused(target, error) from error
                spent = time.monotonic() - started
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1))
                # The pause is random, so that processes that failed together do not retry together.
                pause = random.uniform(longest / 2, longest)
                if spent + pause > self.patience:
                    raise self._silent(target, error, tries, spent) from error
                self._log(target, error, tries, spent)
            await asyncio.sleep(pause)

    def _refused(self, target: str, error: Exception) -> Unreachable:
        if isinstance(error, UserError):  # from the hub's client; it has its own remedy
            return Unreachable(f"{self.url}: cannot be reached: {target}: {error}")
        return Unreachable(
            f"{self.url}: cannot be reached: {target}: {_described(error)}; {_remedy(error)}"
        )

    def _silent(self, target: str, error: Exception, tries: int, spent: float) -> Unreachable:
        self.answered = False  # the next request has only FIRST_PATIENCE
        return Unreachable(
            f"{self.url}: cannot be reached: {target}: requested {counted(tries, 'time')} in"
            f" {spent:.0f} s, the last answer was {_described(error)}; the store itself may be"
            " intact: check the network, and run the same command again later"
        )

    def _log(self, target: str, error: Exception, tries: int, spent: float) -> None:
        now = time.monotonic()
        if spent > QUIET and now - self.logged > QUIET:
            self.logged = now
            logging.getLogger(__name__).warning(
                "%s: %s: %s; requested %s in %.0f s, retrying for up to %.0f s",
                self.url, target, _described(error), counted(tries, "time"), spent, self.patience,
            )  # fmt: skip


def with_refetches(
    remote: bool, work: Callable[[], Result], forget: Callable[[], object] = lambda: None
) -> Result:
    """Call `work`. If it reads over a network and finds damage, call it again, up to FETCHES times
    in all. After each failure, also the last, `forget` drops the damaged bytes from caches.

    A network can flip a bit that its own checksums miss. Raises the StoreError of the last attempt.
    """

    def attempt() -> Result:
        try:
            return work()
        except StoreError:
            forget()
            raise

    for _ in fetch_attempts(remote)[1:]:
        with suppress(StoreError):
            return attempt()
    return attempt()


def fetch_attempts(remote: bool) -> range:
    """Return the attempts at reading data, as a range: FETCHES for `remote` data, which a network
    may damage, else one."""
    return range(FETCHES if remote else 1)
