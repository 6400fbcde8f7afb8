"""Students of vectors in searches: every kind ranks texts, and only students in the teacher's space
search the teacher's vectors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from teachonce.downstream.cli import main as downstream
from teachonce.student_train.cli import main as student_train
from tests.downstream.search.collections import collection
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped, write_corpus
from tests.making.texts import ENGLISH

SMALL = ("--vocab", "450", "--device", "cpu", "--steps", "3", "--batch-texts", "8")


@pytest.fixture(scope="module")
def store(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    corpus = write_corpus(folder / "corpus.txt", 60, ENGLISH)
    return dumped(embedder, corpus, folder / "s.zarr", head="embedding", logits=None)


def test_students_without_layers_put_candidates_in_order(
    store: Path, embedder: Path, tmp_path: Path
) -> None:
    small, student = collection(tmp_path / "small"), tmp_path / "student"
    ok(student_train, "--store", store, "--out", student, *SMALL, "--student", "static:8")
    printed = ok(
        downstream, "--task", "rerank", "--model", student, "--candidates-by", embedder,
        "--depth", "4", "--test", small, "--out", tmp_path / "out",
    )  # fmt: skip
    says(printed, "in their own order: nDCG@10", "recall@4")


@pytest.mark.parametrize("loss", ["similarity=1", "embedding=1", "in-batch=1"])
def test_a_student_of_another_space_searches_no_index_of_the_teachers(
    store: Path, embedder: Path, tmp_path: Path, loss: str
) -> None:
    small, student = collection(tmp_path / "small"), tmp_path / "student"
    words = ("--store", store, "--out", student, *SMALL, "--loss", loss)
    ok(student_train, *words, "--student", "static:32")  # the teacher's hidden size
    search = (
        "--task", "retrieval", "--model", student, "--documents-by", embedder, "--test", small,
        "--out", tmp_path / "out",
    )  # fmt: skip
    if loss != "similarity=1":
        ok(downstream, *search)
        return
    line = refused(downstream, *search)
    says(line, "was trained with similarity, none of which compares its vectors with the teacher's")
    says(line, "train it with --loss embedding=1 as well")


@pytest.mark.apart
def test_the_card_of_a_bilstm_says_how_it_loads(store: Path, tmp_path: Path) -> None:
    student = tmp_path / "this folder"
    ok(student_train, "--store", store, "--out", student, *SMALL, "--student", "bilstm:8,8")
    code = (student / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert code.startswith("import teachonce.checkpoints.bilstm\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"tensor([[1." in done.stdout


def test_one_text_has_no_other_to_be_compared_with(store: Path, tmp_path: Path) -> None:
    words = ("--store", store, "--out", tmp_path / "s", *SMALL[:-1], "1", "--student", "static:8")
    line = refused(student_train, *words)
    says(line, "--batch-texts 1: --loss similarity compares the texts of a batch")
    ok(student_train, *words, "--loss", "embedding=1")
