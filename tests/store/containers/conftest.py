"""A server of objects, and a small store for it, which no test may change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.making.stores import make_store
from tests.rough_network import S3, running_s3
from tests.store.containers.far_stores import STATES_ALONE


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "a.zarr"
    make_store(path, STATES_ALONE, parts=2)
    return path


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return the file system of memory://, and empty it after the test."""
    yield (system := fsspec.filesystem("memory"))
    system.rm("/", recursive=True)


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    with running_s3() as s3:
        yield s3
