"""Stores that several tests read and no test may change."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.making.stores import SMALL, Part, copied, make_store, stores_in

Made = tuple[Path, list[Part]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Return made(ext, codec, tier) -> the path of a sealed store, and the values written."""
    return stores_in(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def copy(tmp_path: Path, made: Callable[..., Made]) -> Callable[..., Path]:
    """Return copy(ext, ...) -> a copy of such a store that the test may damage."""

    def make(ext: str, codec: str = "default", tier: str = "topk") -> Path:
        return copied(made(ext, codec, tier)[0], tmp_path / f"copy.{ext}")

    return make


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return small_store(ext) -> a small sealed store of three parts."""

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
    """Copy a small store in the format of the parameter, or in Zarr, to be damaged."""
    ext = getattr(request, "param", "zarr")
    return copied(small_store(ext), tmp_path / f"a.{ext}")
