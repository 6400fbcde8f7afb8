"""Ask over a network until an answer comes, for a bounded time; tell what an answer means."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from teachonce.store.errors import StoreError, Unreachable
from teachonce.support.console import counted
from teachonce.support.errors import first_line

Result = TypeVar("Result")

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 20.0  # seconds; the pause doubles from try to try
PATIENCE = 300.0  # seconds that an address is asked which has answered before
FIRST_PATIENCE = 20.0  # and one that never has: its name may be wrong
ANSWER_SECONDS, SLOWEST = 60.0, 2**16  # an answer may take so long, and its bytes at this rate
QUIET = 5.0  # seconds of failure before a line is logged, and between two lines

PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
PASSING_CODES = {  # of S3, with a status that would say otherwise
    "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
    "OperationAborted", "InternalError", "ServiceUnavailable", "SlowDown", "Throttling",
}  # fmt: skip
SLOWING_STATUS, SLOWING_CODES = {429, 503, 509}, {"SlowDown", "Throttling"}
# Kinds of errors that clients raise where no answer came, or half of one. Clients are optional and
# are not imported here. OSError is such a kind as well.
PASSING_KINDS = {
    "aiohttp.client_exceptions.ClientError",
    "fsspec.exceptions.FSTimeoutError",
    "http.client.HTTPException",
    "obstore.exceptions.GenericError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "requests.exceptions.ChunkedEncodingError",
    "urllib3.exceptions.HTTPError",
}
FORBIDDEN_KINDS = {"huggingface_hub.errors.OfflineModeIsEnabled"}  # HF_HUB_OFFLINE is set
FETCHES = 4  # of wrong bytes, before they are taken for what the store holds
CREDENTIALS = "the credentials (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
HUB_REMEDY = "check the name, and `hf auth login` or HF_TOKEN; with HF_HUB_OFFLINE nobody is asked"
REMEDIES = {
    **dict.fromkeys(
        ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"),
        "the credentials have expired: renew them, and type the same command again",
    ),
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled", "AccountProblem"),
        f"these credentials may not do this: check {CREDENTIALS} and the rights on the bucket",
    ),
    **dict.fromkeys(
        ("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
         "IllegalLocationConstraintException"),
        "the bucket lies in another region: set AWS_REGION, or AWS_ENDPOINT_URL, to its own",
    ),
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "NoSuchBucket": "there is no such bucket: check its name, or make it",
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
         "InsufficientCapacity"),
        "the bucket is full: make room, and type the same command again",
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
BARE_REDIRECT = "redirect without LOCATION"  # obstore's words where S3 names no other address


class Answer(NamedTuple):
    """What a server answered instead of what was asked for: HTTP status, and code and message of
    its own where it gave them."""

    status: int
    code: str
    message: str


def answer_of(error: BaseException) -> Answer | None:
    """The answer that an error of a client stands for; None if none came."""
    if _module(error) == "obstore" or isinstance(error, FileNotFoundError):
        return _of_obstore(str(error))
    # aiohttp; the hub's client keeps the answer. What an error comes from may have a status that
    # nobody answered.
    told = getattr(error, "response", None) or error
    for key in ("status", "status_code", "code"):
        status = getattr(told, key, None)
        if isinstance(status, int) and 300 <= status < 600:
            return Answer(status, "", first_line(error))
    return None


def _module(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _of_obstore(text: str) -> Answer | None:
    """The answer that is quoted in an error of obstore."""
    if BARE_REDIRECT in text:
        return Answer(301, "PermanentRedirect", "no address was given")
    status = re.search(r"status code: (\d{3})", text)
    if status is None:
        return None
    code, message = (
        re.search(f"<{key}>(.*?)</{key}>", text, re.DOTALL) for key in ("Code", "Message")
    )
    return Answer(int(status[1]), code[1] if code else "", message[1] if message else "")


def _is_of(error: BaseException, kinds: set[str]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in kinds for kind in type(error).__mro__)


def passing(error: BaseException) -> bool:
    """Whether an error may be gone when the same is asked again."""
    if answer := answer_of(error):
        return answer.status in PASSING_STATUS or answer.code in PASSING_CODES
    if isinstance(error, OSError):  # ConnectionError and TimeoutError among them
        return not isinstance(error, PermissionError) and not _is_of(error, FORBIDDEN_KINDS)
    return _is_of(error, PASSING_KINDS)


def slows(error: BaseException) -> bool:
    """Whether a server asks for fewer requests."""
    answer = answer_of(error)
    return answer is not None and (answer.status in SLOWING_STATUS or answer.code in SLOWING_CODES)


def _told(error: BaseException) -> str:
    """An answer, or an error, in a few words."""
    answer = answer_of(error)
    if answer is None:
        name = type(error).__name__
        line = first_line(error)
        return line if line.startswith(name) else f"{name}: {line}"
    code = "" if answer.code in ("", str(answer.status)) else f" {answer.code}"
    message = " ".join(answer.message.split())[:200].rstrip(".")
    return f"HTTP {answer.status}{code}" + (f" ({message})" if message else "")


def _remedy(error: BaseException) -> str:
    if _module(error) == "huggingface_hub":
        return HUB_REMEDY
    if answer := answer_of(error):
        found = REMEDIES.get(answer.code) or OF_STATUS.get(answer.status)
        if found:
            return found
    if isinstance(error, PermissionError):
        return OF_STATUS[403]
    return f"check the address, the network and {CREDENTIALS}"


@dataclass
class Line:
    """A line to the place of a store, and how patient to be with it."""

    url: str
    answered: bool = False
    logged: float = 0.0
    slowed: int = 0  # answers that asked for fewer requests

    @property
    def patience(self) -> float:
        return PATIENCE if self.answered else FIRST_PATIENCE

    async def ask(
        self, what: str, request: Callable[[], Awaitable[Result]], size: int | None = 0
    ) -> Result:
        """Send a request for `what` until it is answered, with growing pauses.

        An answer of `size` bytes may take its time; None is any time. Raises Unreachable where no
        answer came in time, or one that asking again will not change; what is not there is an
        answer, too (FileNotFoundError).
        """
        begun, tries = time.monotonic(), 0
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
                if (answer := answer_of(error)) and answer.code == "NoSuchBucket":
                    raise self._refused(what, error) from error
                raise
            except Exception as error:  # every client raises its own
                if not passing(error):
                    raise self._refused(what, error) from error
                self.slowed += slows(error)
                spent = time.monotonic() - begun
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1))
                pause = random.uniform(longest / 2, longest)
                if spent + pause > self.patience:
                    raise self._silent(what, error, tries, spent) from error
                self._log(what, error, tries, spent)
            await asyncio.sleep(pause)

    def _refused(self, what: str, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.url}: cannot be reached: {what}: {_told(error)}; {_remedy(error)}"
        )

    def _silent(self, what: str, error: Exception, tries: int, spent: float) -> Unreachable:
        self.answered = False  # so that nobody else waits as long
        return Unreachable(
            f"{self.url}: cannot be reached: {what}: asked {counted(tries, 'time')} in"
            f" {spent:.0f} s, the last answer was {_told(error)}; this says nothing about the"
            " store itself: check the network, and type the same command again later"
        )

    def _log(self, what: str, error: Exception, tries: int, spent: float) -> None:
        now = time.monotonic()
        if spent > QUIET and now - self.logged > QUIET:
            self.logged = now
            logging.getLogger(__name__).warning(
                "%s: %s: %s; asked %s in %.0f s, asking for up to %.0f s",
                self.url, what, _told(error), counted(tries, "time"), spent, self.patience,
            )  # fmt: skip


def surely(remote: bool, work: Callable[[], Result]) -> Result:
    """Do work that finds damage; where it reads over a network, believe it when it finds it again.

    A bit may be flipped on the way, and past the checksums of the network. Raises the StoreError of
    the last time.
    """
    for _ in fetches(remote)[1:]:
        with suppress(StoreError):
            return work()
    return work()


def fetches(remote: bool) -> range:
    """As often is something fetched that looks damaged."""
    return range(FETCHES if remote else 1)
