"""Some commands and a hostile hub; `python -m benchmarks.integrity hubs` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrity.hostile_hubs import _judged, ended, given_in


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    given_in(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "begin", "twist"),
    [
        ("--model", "HEAD /user/model", "outside"),
        ("hf://", "GET /api/datasets", "endless"),
        pytest.param("push", "POST /api/repos", "drip_headers", marks=pytest.mark.apart),
    ],
)
def test_a_line_or_the_whole(given: Path, name: str, begin: str, twist: str) -> None:
    assert ended(given, name, begin, twist) == ("one-line error", "")


def test_what_is_wrong() -> None:
    assert _judged("fine", 0, []) == ("worked", "")
    for said, code, outside in (
        *(("Traceback (most recent call last)", 1, []), ("", 1, []), ("Error: a", -9, [])),
        *(("Error: [Errno 27] File too large", 1, []), ("Error: a", 1, ["outside"])),
    ):
        assert _judged(said, code, outside)[0] == "failures"
