"""Never train on a wrong dump: repeated trainings are equal, and altered stores are refused."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import click
import h5py
import numpy as np
import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import UserError, open_store
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.end_to_end.support import STUDENT, Words, invoke, ok, refused, report_of, says, tree
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.making.stores import copied
from tests.store.dying import unsealed
from tests.store.tools.test_stored_tokens import forge, put
from tests.store.write.test_writing import contents

FORMATS = ("zarr", "h5")
TRAINING = ("--vocab", "450", "--steps", "6", "--held-out", "0.2", *STUDENT)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("trust") / "corpus.txt", 12)


def options(model: Path, corpus: Path, out: Path) -> DumpOptions:
    """Return the options of a dump with several parts, masks and draws."""
    small = {"part_tokens": 200, "batch_tokens": 256, "max_length": 48}
    return dump_options(model, corpus, out, views=2, logits="sample:9", **small)


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers, corpus: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    for ext in FORMATS:
        dump(options(tiny_teacher("bert"), corpus, folder / f"a.{ext}"))
    return {ext: folder / f"a.{ext}" for ext in FORMATS}


@pytest.mark.slow
@pytest.mark.parametrize("ext", FORMATS)
def test_the_same_dump_gives_the_same_bytes(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, stores: dict[str, Path], ext: str
) -> None:
    again = tmp_path / f"a.{ext}"
    dump(options(tiny_teacher("bert"), corpus, again))
    assert contents(again) == contents(stores[ext])
    assert len({open_store(path).manifest.content() for path in (again, *stores.values())}) == 1


@pytest.mark.parametrize("ext", FORMATS)
def test_damaged_parts_alone_are_dumped_again(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, stores: dict[str, Path], ext: str
) -> None:
    store, name = copied(stores[ext], tmp_path / f"a.{ext}"), "view1/hidden/mean/values"
    parts = len(open_store(store).manifest.parts)
    before = contents(store)
    if ext == "zarr":
        shard = store / f"parts/1/{name}/c/0/0"
        shard.write_bytes(shard.read_bytes()[:-99])
        shutil.rmtree(store / "parts/2")
    else:
        with h5py.File(store, "r+") as file:
            file[f"parts/1/{name}"][3, 4] ^= 1
            del file["parts/2"]
    arguments = options(tiny_teacher("bert"), corpus, store)
    with pytest.raises(UserError, match="exists already .* `feature-store repair /"):
        dump(arguments)
    said = ok(feature_store, "repair", store)
    says(said, f"part 1: array {name}", f"{parts - 2} sound parts left", "teacher-dump")

    done = dump(arguments)
    assert done.resumed_parts == parts - 2 and done.parts == parts > 3
    assert contents(store) == before and verify(store).problems == []


def test_the_same_training_gives_the_same_student(tmp_path: Path, stores: dict[str, Path]) -> None:
    """From either format of a store; it records its source."""
    for ext in FORMATS:
        ok(student_train, "--store", stores[ext], "--out", tmp_path / ext, *TRAINING)
    one, other = tmp_path / "zarr", tmp_path / "h5"
    for name in ("model.safetensors", "tokenizer.json", "config.json", "metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    report = report_of(one)
    store = open_store(stores["h5"])
    assert report["store"]["content"] == store.manifest.content()
    assert report["store"]["identity"] == store.identity
    assert report["store"]["software"] == store.meta["software"]
    assert report["environments"][0]["threads"] == 1 and report["settings"]["seed"] == 0
    card = (one / "README.md").read_text()
    says(card, store.manifest.content(), store.identity["teacher"]["weights_hash"])
    says(card, store.identity["corpus"]["sources"][0]["sha256"], version("torch"), "sample")
    assert store.manifest.content()[:12] in ok(feature_store, "info", stores["h5"])


@pytest.mark.parametrize("ext", FORMATS)
def test_an_unfinished_store_only_when_asked_for(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, ext: str
) -> None:
    path, out = tmp_path / f"a.{ext}", tmp_path / "student"
    with unsealed():
        dump(options(tiny_teacher("bert"), corpus, path))
    before = tree(tmp_path)
    commands: tuple[tuple[click.Command, Words, str], ...] = (
        (student_train, ("--store", path, "--out", out, *TRAINING), f"student in {out}"),
        (feature_store, ("info", path), "writing"),
        (feature_store, ("show", path, "0"), "sequence 0"),
        (feature_store, ("verify", path), "sound"),
    )
    for command, words, _ in commands:
        line = refused(command, *words)
        says(line, "is not finished (", "teacher-dump", "same arguments", "--allow-partial")
    assert tree(tmp_path) == before
    for command, words, printed in commands:
        says(ok(command, *words, "--allow-partial"), printed)
    assert report_of(out)["store"]["state"] == "writing"
    assert "writing" in (out / "README.md").read_text()


def test_a_training_is_not_resumed_on_other_numbers(
    tmp_path: Path, stores: dict[str, Path]
) -> None:
    """The same dump in another format is accepted, one altered value is not."""
    other = copied(stores["h5"], tmp_path / "a.h5")
    words = ("--out", tmp_path / "student", *TRAINING)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("teachonce.student_train.output.run._finish", lambda *_: 1 / 0)
        ok(student_train, "--store", stores["zarr"], *words)
    forge(other, "parts/0/view1/hidden/mean/values", put((0, 0), 1))
    line = refused(student_train, "--store", other, *words, "--resume")
    says(line, "not the store that it was trained on")
    ok(student_train, "--store", stores["h5"], *words, "--resume")


def test_tokens_that_the_tokenizer_does_not_give(tmp_path: Path, stores: dict[str, Path]) -> None:
    """They are refused before training, and found by verify at any position."""
    store = copied(stores["h5"], tmp_path / "a.h5")
    middle = open_store(store)
    sequences = middle.manifest.parts[0].counts.sequences
    ids = np.array(middle[sequences - 1].token_ids)
    middle.close()
    with h5py.File(store) as file:
        place = len(file["parts/0/token/id"]) - 3
    forge(store, "parts/0/token/id", put(place, int(ids[-3]) % 400 + 7))
    result = invoke(feature_store, "verify", store)
    assert result.exit_code == 1
    says(result.output, "part 0", "does not give the stored tokens")
    forge(store, "parts/0/token/id", put(1, 9))
    line = refused(student_train, "--store", store, "--out", tmp_path / "out", *TRAINING)
    says(line, "does not give the stored tokens", "dump again")
    assert not (tmp_path / "out").exists()


def test_offsets_outside_the_text_end_a_training_in_one_line(
    tmp_path: Path, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the checked sample does not contain the error."""
    monkeypatch.setattr("teachonce.student_train.output.run.check_tokens", lambda store: None)
    store = copied(stores["h5"], tmp_path / "a.h5")
    with h5py.File(store) as file:
        place = len(file["parts/0/token/end"]) - 3
    forge(store, "parts/0/token/end", put(place, 9999))
    more = ("--held-out", "0", "--epochs", "1", "--vocab", "450", *STUDENT)
    line = refused(student_train, "--store", store, "--out", tmp_path / "out", *more)
    says(line, "feature-store verify")  # found by the reader, or earlier by the aligning thread
    assert "part 0: offsets outside the text" in line or "to 9999 of a text of" in line
