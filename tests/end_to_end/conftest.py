"""A corpus and a store of it that several modules read; nobody may change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.support import dumped, write_corpus


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums of two threads are rounded otherwise, and what is compared has to be equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def store(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path], corpus: Path
) -> Path:
    folder = tmp_path_factory.mktemp("store")
    return dumped(tiny_teacher("bert"), corpus, folder / "store.zarr", hidden="mean,groups:2")
