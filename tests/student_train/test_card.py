"""The model card tells a stranger where the student comes from, and nothing of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from store import open_store
from student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, dumped, ok, write_corpus

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(
    tmp_path: Path, tiny_teacher: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The id of a model in the hub's cache."""
    repository = tmp_path / "hub" / "models--acme--mini"
    shutil.copytree(tiny_teacher("bert"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "acme/mini"


def card(teacher: str, folder: Path) -> str:
    store = dumped(Path(teacher), write_corpus(folder / "corpus.txt"), folder / "store.zarr")
    words = ("--store", store, "--vocab", "450", "--steps", "2", "--out", folder / "student")
    ok(student_train, *words, *STUDENT)
    return (folder / "student" / "README.md").read_text()


def test_a_teacher_of_the_hub_is_the_base_model(hub: str, tmp_path: Path) -> None:
    text = card(hub, tmp_path)
    assert "base_model: acme/mini\n" in text and "# Student of acme/mini\n" in text
    assert open_store(tmp_path / "store.zarr").identity["teacher"]["revision"] == COMMIT


def test_a_teacher_of_this_machine_is_not(
    tiny_teacher: Callable[[str], Path], tmp_path: Path
) -> None:
    teacher = tiny_teacher("bert")
    text = card(str(teacher), tmp_path)
    assert "base_model" not in text and "# Student of bert\n" in text
    assert "| store | store.zarr |" in text
    assert str(teacher.parent) not in text and str(tmp_path) not in text
