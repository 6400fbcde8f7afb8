"""Stores that several tests read; nobody may change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.store.making import SMALL, Part, features_of, make_store

Made = tuple[Path, list[Part]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """made(ext, codec, tier) -> path of a sealed store, and what went in."""
    known: dict[tuple[str, ...], Made] = {}

    def make(ext: str, codec: str = "default", tier: str = "topk") -> Made:
        if (ext, codec, tier) not in known:
            path = tmp_path_factory.mktemp("stores") / f"{codec}-{tier}.{ext}"
            known[ext, codec, tier] = (path, make_store(path, features_of(codec, tier)))
        return known[ext, codec, tier]

    return make


def copied(source: Path, target: Path) -> Path:
    """Copy a store of files or of one file."""
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, target))


@pytest.fixture
def copy(tmp_path: Path, made: Callable[..., Made]) -> Callable[..., Path]:
    """copy(ext, ...) -> a copy of such a store that the test may damage."""

    def make(ext: str, codec: str = "default", tier: str = "topk") -> Path:
        return copied(made(ext, codec, tier)[0], tmp_path / f"copy.{ext}")

    return make


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """small_store(ext) -> a small sealed store of three parts."""

    @cache
    def make(ext: str) -> Path:
        path = tmp_path_factory.mktemp("small") / f"a.{ext}"
        make_store(path, SMALL)
        return path

    return make


@pytest.fixture
def store(
    tmp_path: Path, request: pytest.FixtureRequest, small_store: Callable[[str], Path]
) -> Path:
    """A copy of such a store in the format of the parameter, to be damaged."""
    return copied(small_store(request.param), tmp_path / f"a.{request.param}")
