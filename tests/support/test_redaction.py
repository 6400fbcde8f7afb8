"""Printed or published text contains no password, no signature and no path."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from teachonce.store import StoreError
from teachonce.support.errors import UserError
from teachonce.support.redaction import publishable, redacted, without_credentials

CLEAN = "https://host:8/a.zarr"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:CANARY@host:8/a.zarr",
        "https://CANARY@host:8/a.zarr",
        "https://me:CAN/ARY?x#y@host:8/a.zarr",
        "https://host:8/a.zarr?X-Amz-Signature=CANARY&X-Amz-Date=1",
        "https://me:CANARY@host:8/a.zarr?sig=CANARY",
    ],
)
def test_urls(url: str) -> None:
    for around in ("{}", "cannot open {} then", "({})", '"{}"', "<{}>", "[here]({})"):
        assert redacted(around.format(url)) == around.format(CLEAN)
    nested: dict[str, Any] = {"a": [{"b": (url, 3, None)}], url: True}
    assert redacted(nested) == {"a": [{"b": [CLEAN, 3, None]}], CLEAN: True}


def test_what_is_no_secret() -> None:
    for text in (
        "https://films.org/@user/x", "https://host:8080/a@b", "s3://bucket/a.zarr", "me@host: 3",
        "https://docs.org/page#part", "is it? yes", "a/b and c", "1/2", "hf_hub", "",
    ):  # fmt: skip
        assert redacted(text) == publishable(text) == text
    link = "[a film](https://films.org/watch?v=7) by https://me:CANARY@host/a"
    assert without_credentials(link) == "[a film](https://films.org/watch?v=7) by https://host/a"


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "CANARYCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "short")
    text = "sent CANARYCANARY and hf_abcdefghijklmnopqrstuvwx, short"
    assert redacted(text) == without_credentials(text) == "sent *** and hf_***, short"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/me/a store.zarr", "a store.zarr"),
        ("~/a.zarr", "a.zarr"),
        ("../me/a.zarr", "a.zarr"),
        ("cut out of /home/me/teacher, then trained", "cut out of teacher, then trained"),
        ("file:///home/me/a.zarr", "a.zarr"),
        ("svd:/home/me/a.zarr", "svd:a.zarr"),
        ("https://host:8080/a/b", "https://host:8080/a/b"),
        ("a|/home/me/a.zarr|b", "a|a.zarr|b"),
        ("(~me/b/a.zarr): no", "(a.zarr): no"),
        ("`/srv/x/y`", "`y`"),
    ],
)
def test_paths(text: str, clean: str) -> None:
    assert publishable(text) == clean and redacted(text) == text


def test_errors_have_no_password() -> None:
    error = StoreError("https://me:CANARY@host:8/a.zarr: is not there")
    assert str(error) == f"{CLEAN}: is not there"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(UserError()) == ""
