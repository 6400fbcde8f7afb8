"""`--student-column`: the teacher reads a text in one language, the student in another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.option_values import Shard
from teachonce.teacher_dump.job.sharing import share
from tests.end_to_end.support import Words, ok, refused, says
from tests.end_to_end.test_embedding_students import encoded
from tests.making.dumps import dump_options, dumped

PAIRS = (
    ("The old keeper lights the lamp.", "Старый смотритель зажигает лампу."),
    ("A story is never finished.", "История никогда не кончается."),
    ("She counted the ships in the harbour.", "Она считала корабли в гавани."),
    ("The student learns from the teacher.", "Ученик учится у учителя."),
    ("Nobody knows why the clock stopped.", "Никто не знает, почему часы остановились."),
    ("Rivers carry stones.", "Реки несут камни."),
    ("The trains leave for the north.", "Поезда уходят на север."),
    ("In the library they keep maps.", "В библиотеке хранятся карты."),
)
COLUMNS = ("--text-column", "en", "--student-column", "ru")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("ru\ten\n" + "".join(f"{ru}\t{en}\n" for en, ru in PAIRS), encoding="utf-8")
    return path


def typed(embedder: Path, table: Path, out: Path) -> Words:
    return ("--model", embedder, "--corpus", table, "--out", out, "--device", "cpu")


def test_vectors_of_one_text_beside_the_other(embedder: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    words = (*typed(embedder, table, out), "--head", "embedding", *COLUMNS, "--codec", "exact")
    message = ok(teacher_dump, *words, "--prompt", "query")
    says(message, "embedding of width 32 (mean, length 1, prompt 'find: ', of column en)")
    store = open_store(out)
    assert list(store.texts()) == [f"find: {ru}" for _, ru in PAIRS]
    english = encoded(embedder, [en for en, _ in PAIRS], prompt_name="query")
    assert np.allclose(store.embeddings(), english, atol=2e-5)
    assert store.identity["corpus"]["text_column"] == "en"
    assert store.identity["corpus"]["student_column"] == "ru"
    assert verify(out).problems == []
    says(ok(feature_store, "info", out), "of length 1, prompt 'find: ', of a parallel text")
    line = refused(feature_store, "verify", out, "--model", embedder)
    says(line, "does not hold the texts of its vectors", "verify it without --model")


def test_processes_that_share_a_dump_make_the_same_store(
    embedder: Path, table: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "head": "embedding", "logits": None, "text_column": "en", "student_column": "ru",
        "part_tokens": 40,
    }  # fmt: skip
    one, two = tmp_path / "one.zarr", tmp_path / "two.zarr"
    dumped(embedder, table, one, **asked)
    share(dump_options(embedder, table, two, **asked), Shard(0, 1))
    assert len(open_store(two).manifest.parts) > 2
    contents = {open_store(path).manifest.content() for path in (one, two)}
    assert len(contents) == 1


@pytest.mark.slow
def test_a_student_of_one_language_finds_what_the_teacher_says_of_another(
    embedder: Path, table: Path, tmp_path: Path
) -> None:
    """With a store of the teacher's own language it learns both."""
    stores = tmp_path / "ru.zarr", tmp_path / "en.zarr"
    for path, columns in zip(stores, (COLUMNS, ("--text-column", "en")), strict=True):
        ok(teacher_dump, *typed(embedder, table, path), "--head", "embedding", *columns)
    both = [word for path in stores for word in ("--store", path)]
    ok(
        student_train, *both, "--out", tmp_path / "s", "--vocab", "300", "--student", "32x1x2",
        "--device", "cpu", "--steps", "150", "--batch-texts", "8", "--lr", "0.006",
        "--held-out", "0",
    )  # fmt: skip
    wanted = encoded(embedder, [en for en, _ in PAIRS])
    for side in (0, 1):
        found = encoded(tmp_path / "s", [pair[side] for pair in PAIRS])
        assert (found * wanted).sum(axis=1).mean() > 0.95
        # A teacher with random weights has nearly the same outputs for all texts, so only the
        # differences identify a text.
        rest, other = (vectors - vectors.mean(axis=0) for vectors in (found, wanted))
        places = (rest @ (other / np.linalg.norm(other, axis=1, keepdims=True)).T).argmax(axis=1)
        assert (places == np.arange(len(PAIRS))).mean() > 0.8


def test_texts_without_another(embedder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.tsv"
    half.write_text("en\tru\nRivers carry stones.\t\n", encoding="utf-8")
    given = (*typed(embedder, half, tmp_path / "a.zarr"), "--head", "embedding", *COLUMNS)
    message = "the second text of pair 1 is empty ('Rivers carry stones. | ')"
    says(refused(teacher_dump, *given), message, "; fill it in, or remove the row")
