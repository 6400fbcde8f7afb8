"""Fixtures that several tests of benchmarks share."""

from pathlib import Path

import pytest

from tests.making.texts import ENGLISH, FRENCH, GERMAN


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few hundred lines of several languages."""
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    lines = [f"{a} {b}" for a in ENGLISH + GERMAN for b in FRENCH + GERMAN[:2]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
