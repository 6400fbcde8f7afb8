"""Fixtures of mixed-vocabulary training: a small student's tokenizer, a store with embeddings."""

from pathlib import Path
from typing import Any

import pytest

from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok
from tests.making.dumps import write_corpus
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import SENTENCES
from tests.teacher_dump.mixed_vocab.support import LONGEST, PIECES, WIDTH


@pytest.fixture(scope="session")
def small(make_tokenizer: Tokenizers) -> Any:
    """Return the student's tokenizer: fewer pieces of the same text."""
    from teachonce.student_train.model.student_tokenizer import (
        train_student_wordpiece as student_wordpiece,
    )

    return student_wordpiece(SENTENCES, PIECES, None)


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers
) -> tuple[Path, Path, tuple[Any, ...]]:
    """Make a Zarr store with the command; return it, the corpus, and the arguments."""
    folder = tmp_path_factory.mktemp("mixed")
    corpus = write_corpus(folder / "corpus.txt", 60)
    words = (
        *("mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus, "--vocab", PIECES),
        *("--width", WIDTH, "--steps", 6, "--batch-tokens", 512, "--max-length", LONGEST),
        *("--device", "cpu", "--seed", 2),
    )
    said = ok(teacher_dump, *words, "--out", folder / "store.zarr")
    assert "step 6/6" in said and f"--student {WIDTH}xLxA --loss mlm=1" in said
    assert not (folder / "store.zarr.mixed-vocab").exists()
    return folder / "store.zarr", corpus, words
