"""Remove secrets from text that is printed, logged or published: passwords, signatures, tokens,
paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

# Of a URL: the user, or user and password; a password may have any character except a space.
CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/?#@]*@|[^\s/@?#:\"']+:(?!\d+(?:/|$))[^\s@\"']*@)")
QUERY = re.compile(r"(?<=://)([^\s?#\"'<>)]*)\?[^\s\"'<>)]*")  # query of a URL, e.g. a signature
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b")  # a token of the hub
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
FILE_URL = re.compile(r"\b(file|local)://(/[^\s\"'<>)]*)")
# Values of --init and --cache: their path extends to the end of the line, and may contain spaces.
WORD_OF_PATH = re.compile(r"(svd:|folder:|disk:|layers:[\d,]+@)(?=[/~.])([^\n]+)")
# A path may follow a colon (vectors:/home/ann/a.vec), but must not be part of a URL.
PATH = re.compile(r"(?<![\w./~<])(?!(?<=:)//)(?:~[\w.-]*|\.{1,2})?(?:/[^\s/\"'<>|,;:()]+){2,}/?")


def redacted(value: Any) -> Any:
    """Return text, or JSON, without secrets: user and password in URLs, the query of URLs, tokens
    of the hub, and the values of the variables in SECRETS."""
    return _each_text(value, _redacted)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to a text, or to each text and key in JSON."""
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _redacted(text: str) -> str:
    text = without_credentials(text)
    return QUERY.sub(r"\1", text) if "://" in text else text


def without_credentials(text: str) -> str:
    """Redact as `redacted` does, but leave the query of a URL unchanged, because authors write
    links with queries."""
    if "://" in text:
        text = CREDENTIALS.sub("", text)
    if "hf_" in text:
        text = TOKEN.sub("hf_***", text)
    for name in SECRETS:
        secret = os.environ.get(name, "")
        # A shorter value may be an ordinary word of the text.
        if len(secret) >= 8 and secret in text:
            text = text.replace(secret, "***")
    return text


def publishable(value: Any) -> Any:
    """Redact as `redacted` does, and shorten paths of this machine to the name of the file."""
    return _each_text(value, lambda text: without_paths(_redacted(text)))


def without_paths(text: str) -> str:
    """Shorten absolute paths, and paths that start with `~`, `.` or `..`, to the name of the file
    or folder."""
    if "/" not in text:
        return text
    if text.startswith(("/", "~", "./", "../")) and "\n" not in text:
        return PurePath(text).name  # a path, which may contain spaces
    if match := WORD_OF_PATH.fullmatch(text):
        return match[1] + PurePath(match[2]).name
    text = FILE_URL.sub(lambda match: PurePath(match[2]).name, text)
    return PATH.sub(lambda match: PurePath(match[0]).name, text)
