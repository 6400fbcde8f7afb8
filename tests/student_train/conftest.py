"""Share one small store of a real teacher, with a masked view, between the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from teachonce.store import FeatureStore, open_store
from tests.making.dumps import dumped, write_corpus


@pytest.fixture(scope="session")
def store(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path]
) -> FeatureStore:
    folder = tmp_path_factory.mktemp("student_train")
    corpus = write_corpus(folder / "corpus.txt", 60)
    return open_store(dumped(tiny_teacher("bert"), corpus, folder / "store.zarr", views=2))
