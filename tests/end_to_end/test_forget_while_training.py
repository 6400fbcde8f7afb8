"""Documents are forgotten while a student trains from the store: the training ends with a line."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread

import pytest

from teachonce.student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, refused, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.stores import copied
from tests.store.tools import forgetting


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    corpus, teacher = write_corpus(folder / "corpus.txt"), tiny_teacher("distilbert")
    for ext in ("zarr", "h5"):
        dumped(teacher, corpus, folder / f"a.{ext}", max_length=64, weights=False)
    return folder


@pytest.mark.parametrize(
    ("ext", "how"),
    [
        ("zarr", ("--cache", "ram")),
        ("h5", ()),
        ("zarr", ("--workers", 2)),
        pytest.param("h5", ("--cache", "device"), marks=pytest.mark.apart),
    ],
)
def test_a_training_ends(
    tmp_path: Path, stores: Path, ext: str, how: tuple[str | int, ...]
) -> None:
    """Also with a cache in memory; its checkpoints stay unfinished."""
    path, out = copied(stores / f"a.{ext}", tmp_path / f"a.{ext}"), tmp_path / "student"

    def forget() -> None:
        log = out / "metrics.jsonl"
        while not ended.is_set():
            if log.exists() and log.stat().st_size:
                forgetting.run(path, 3)
                break
            time.sleep(0.02)

    ended, thread = Event(), Thread(target=forget)
    thread.start()
    words = ("--store", path, "--vocab", 300, "--out", out, *STUDENT, "--loss", "mlm=1,hidden=1")
    try:
        line = refused(student_train, *words, "--steps", 100_000, *how)
    finally:
        ended.set()
        thread.join()
    says(line, f"{path}: ", "documents were forgotten, or another store now has its name")
    assert not (out / "config.json").exists()
    line = refused(student_train, *words, "--steps", 100_000, "--resume")
    says(line, str(out))
