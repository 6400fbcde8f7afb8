"""Stores that several tests read; nobody may change them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.making import Part, features_of, make_store

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


@pytest.fixture
def copy(tmp_path: Path, made: Callable[..., Made]) -> Callable[..., Path]:
    """copy(ext, ...) -> a copy of such a store that the test may damage."""

    def make(ext: str, codec: str = "default", tier: str = "topk") -> Path:
        source, target = made(ext, codec, tier)[0], tmp_path / f"copy.{ext}"
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        return target

    return make


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A small sealed store of three parts in the format of the parameter, to be damaged."""
    path: Path = tmp_path / f"a.{request.param}"
    make_store(path, dataclasses.replace(features_of(), hidden=("mean",), attention=(), views=1))
    return path
