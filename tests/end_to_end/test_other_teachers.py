"""Students of teachers that are no masked LMs: their states teach, their logits are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, dumped, ok, refused, says, write_corpus

STEPS = ("--vocab", "500", "--steps", "3", *STUDENT, "--init", "svd")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path]) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    corpus = write_corpus(folder / "corpus.txt", 60)
    model = tiny_teacher("gpt2")
    return dumped(model, corpus, folder / "store.zarr", head="causal", attention="none")


def test_states_of_a_causal_teacher(tmp_path: Path, causal: Path) -> None:
    said = ok(student_train, "--store", causal, "--out", tmp_path / "student", *STEPS)
    assert "1 mlm + 30 hidden; span" in said


@pytest.mark.parametrize("loss", ["kl", "logit", "hard"])
def test_logits_of_the_next_token(tmp_path: Path, causal: Path, loss: str) -> None:
    words = ("--store", causal, "--out", tmp_path / "student", *STEPS, "--loss", f"mlm,{loss}")
    says(refused(student_train, *words), f"--loss {loss}", "of the token after", "use mlm")
