"""Shared fixtures: real tokenizers trained here and small real teachers with a masked-LM head.

Nothing is downloaded. Heavy imports stay inside the fixtures, so that the tests of `store` and
`align` start fast.

- `make_tokenizer(kind)`: kind in TOKENIZER_KINDS -> PreTrainedTokenizerFast
- `tiny_teacher(kind)`: kind in TEACHER_KINDS -> Path of a transformers folder (float32);
  `tiny_teacher(kind, "classification", labels)` or `"tagging"`: with such a head instead;
  `tiny_teacher("gpt2")`: a causal one
- `tiny_store(kind, documents, **options)`: such a teacher's dump of a small corpus -> Path
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.making.environment import set_environment
from tests.making.models import TOKENIZER_OF, Teachers, random_model, trained_tokenizer

set_environment()
settings.register_profile(
    "untimed", deadline=None, max_examples=50
)  # a first example may train a tokenizer
settings.load_profile("untimed")


def pytest_sessionstart() -> None:
    """Disable garbage collection during the collection of tests: its 700,000 objects are permanent,
    and searching them took a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # searches were a fortieth of the time of the tests
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Restore Ctrl-C, which a shell's background jobs, and all processes that they start,
    ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Replace fsync, which takes most of the time of small stores; no test cuts the power.

    Writers in separate processes (which tests kill) still call it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        # Sixteen threads per part would only add overhead.
        patch.setattr("teachonce.store.containers.zarr.tree.sync_tree", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], Any]:
    """Return a function that makes a new PreTrainedTokenizerFast of a kind."""
    return trained_tokenizer


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function `tiny_teacher(kind)` -> folder of a random teacher and its tokenizer, saved
    once."""
    root = tmp_path_factory.mktemp("teachers")

    @cache
    def saved(kind: str, head: str | None = None, labels: tuple[str, ...] = ()) -> Path:
        tokenizer = trained_tokenizer(TOKENIZER_OF[kind])
        folder = root / "-".join([kind, *([head] if head else []), *labels])
        head = head or ("causal" if kind == "gpt2" else "mlm")
        random_model(kind, tokenizer, head, labels).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return saved


@pytest.fixture(scope="session")
def tiny_store(
    tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a function `tiny_store(kind, documents, **options)` -> store, dumped once. No test may
    change it."""
    from tests.making.dumps import dumped, write_corpus

    root = tmp_path_factory.mktemp("stores")

    @cache
    def dumped_once(kind: str, documents: int = 60, **options: Any) -> Path:
        folder = root / str(len(list(root.iterdir())))
        folder.mkdir()
        corpus = write_corpus(folder / "corpus.txt", documents)
        return dumped(tiny_teacher(kind), corpus, folder / "store.zarr", **options)

    return dumped_once
