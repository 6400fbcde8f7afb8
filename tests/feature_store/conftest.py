"""Share a store between several tests; no test may change it."""

from pathlib import Path

import pytest

from tests.making.stores import features_of, make_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a sealed store with two views, hidden states, maps and topk logits."""
    path = tmp_path_factory.mktemp("look") / "a.zarr"
    make_store(path, features_of(), parts=2)
    return path
