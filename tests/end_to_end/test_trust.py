"""A student is made from the right store alone, and publishes nothing else.

- Never train on a wrong dump: repeated trainings are equal, and altered stores are refused.
- Students are made from the store alone: the teacher's folder is deleted, the network off.
- A folder full of canaries takes part in every push and every page, and no canary is published.
"""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from teachonce.student_export.cli import main as student_export
from teachonce.student_export.costs import Costs
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.end_to_end.support import (
    STUDENT,
    Word,
    Words,
    invoke,
    ok,
    refused,
    report_of,
    says,
    start,
    tree,
)
from tests.hub_contents import Hub
from tests.hub_server import asked_by_this_process, serving
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers, Tokenizers
from tests.making.stores import copied
from tests.store.dying import unsealed
from tests.store.tools.test_verify import forge, put
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


TEXT = "The old lighthouse keeper {} the stairs every evening."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    folder = tmp_path_factory.mktemp("gone")
    teacher = Path(shutil.copytree(tiny_teacher("distilbert"), folder / "teacher"))
    out = dumped(teacher, write_corpus(folder / "corpus.txt"), folder / "store.h5", max_length=64)
    shutil.rmtree(teacher)
    (folder / "corpus.txt").unlink()
    return out


def check_student(out: Path, vocabulary: int) -> None:
    """Check that a folder is an ordinary transformers folder."""
    model = AutoModelForMaskedLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer) == vocabulary
    assert not list(out.glob("**/*.pt"))
    fill = pipeline("fill-mask", model=str(out))
    found = fill(TEXT.format(tokenizer.mask_token))
    assert len(found) == 5 and all(0 < guess["score"] <= 1 for guess in found)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "valid_mlm" in card


@pytest.mark.slow
def test_as_a_user_would(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--vocab", 400, "--out", tmp_path / "student", *STUDENT)
    loss = ("--steps", 3, "--loss", "mlm=1,kl=1,hidden=1,attention=1")
    process = start("teachonce.student_train.cli", *words, *loss)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    check_student(tmp_path / "student", 400)


def test_initialisation(tmp_path: Path, store: Path) -> None:
    """The saved weights are the initial ones, as the rate is tiny."""
    out = tmp_path / "student"
    words = ("--store", store, "--vocab", "teacher", "--init", "layers:2,4", "--out", out, *STUDENT)
    said = ok(student_train, *words, "--student", "bert:32x2x4", "--steps", "1", "--lr", "1e-12")
    model: Any = AutoModelForMaskedLM.from_pretrained(out)
    weights = open_store(store).teacher_weights()
    words = model.get_input_embeddings().weight.detach().numpy()
    taught = np.asarray(weights["embeddings.word_embeddings.weight"], np.float32)
    check_student(out, len(taught))
    first = model.bert.encoder.layer[0].output.dense.weight.detach().numpy()
    second = np.asarray(weights["transformer.layer.1.ffn.lin2.weight"], np.float32)
    np.testing.assert_allclose(words, taught, atol=1e-4)
    np.testing.assert_allclose(first[:, : second.shape[1]], second, atol=1e-4)
    assert "cut to 32" in said


def test_vocabulary_of_a_folder(tmp_path: Path, store: Path, make_tokenizer: Tokenizers) -> None:
    """Byte-level pieces against the teacher's WordPiece."""
    tokenizer = make_tokenizer("bpe")
    tokenizer.save_pretrained(tmp_path / "bpe")
    for align in ("span", "match", "reduce"):
        out = tmp_path / align
        words = ("--store", store, "--vocab", tmp_path / "bpe", "--out", out, *STUDENT)
        ok(student_train, *words, "--align", align, "--steps", "2", "--loss", "mlm,kl,hidden")
        check_student(out, len(tokenizer))


CANARY = "CANARY"
SECRET = f"https://me:{CANARY}@host:8/a.zarr?X-Amz-Signature={CANARY}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(tmp_path / "storage") as hub:
        asked_by_this_process(hub, monkeypatch, tmp_path / "home")
        monkeypatch.setattr(socket, "gethostname", lambda: f"{CANARY}-host")
        yield hub


@pytest.fixture
def home(tmp_path: Path, tiny_teacher: Teachers) -> Path:
    """Return a folder whose path contains the user's name; all commands receive absolute paths."""
    home = tmp_path / f"{CANARY}-home"
    home.mkdir()
    shutil.copytree(tiny_teacher("distilbert"), home / "teacher")
    write_corpus(home / "corpus.txt")
    return home


def dumped_home(home: Path, out: Path, *more: Word) -> Path:
    words = ("--model", home / "teacher", "--corpus", home / "corpus.txt", "--out", out)
    ok(teacher_dump, *words, "--logits", "topk:8", "--device", "cpu", *more)
    return out


def sent(hub: Hub, name: str) -> dict[str, bytes]:
    """Return all uploads except large files, of which the tests' hub has only chunks."""
    found = dict[str, bytes]()
    for each in hub.repositories[name].files():
        with suppress(KeyError):
            found[each] = hub.read(name, each)
    return found


def check(what: dict[str, bytes]) -> None:
    assert what
    for name, data in what.items():
        for word in (CANARY, str(Path.home()), "/home/"):
            place = data.find(word.encode())
            assert place < 0, f"{name}: {data[max(0, place - 60) : place + 80]!r}"


def plant(folder: Path) -> None:
    """Write files of all kinds that do not belong to a student, and canaries into its own files."""
    (folder / ".env").write_text(f"HF_TOKEN={CANARY}")
    (folder / "notes.txt").write_text(CANARY)
    (folder / "metrics.jsonl").open("a").write(f'{{"{CANARY}": 1}}\n')
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "step-1.pt").write_text(CANARY)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "notes.txt").write_text(CANARY)
    (folder / "link").symlink_to(folder.parent)
    report = report_of(folder)
    report["settings"] |= {"store": SECRET, "word_vectors": f"{folder}/vectors.txt"}
    report["start"] = [f"cut out of {folder}/teacher, then trained", f"read {SECRET}"]
    (folder / "training.json").write_text(json.dumps(report))
    with (folder / "README.md").open("a") as card:
        card.write(f"\nof https://me:{CANARY}@host/a\n")


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_store_and_its_page(hub: Hub, home: Path, ext: str) -> None:
    store = dumped_home(home, home / f"a.{ext}", "--no-weights", "--limit", 30)
    (store / CANARY if ext == "zarr" else home / CANARY).write_text(CANARY)  # not of the store
    ok(feature_store, "page", store, "--vocab", home / "teacher", "--out", home / "page.html")
    ok(feature_store, "push", store, "user/store")
    check(sent(hub, "datasets/user/store"))
    of_store = [store] if ext == "h5" else [p for p in store.rglob("*") if p.name != CANARY]
    assert not any(CANARY in name for name in hub.repositories["datasets/user/store"].files())
    check({str(each): each.read_bytes() for each in of_store if each.is_file()})
    check({"page": (home / "page.html").read_bytes()})


@pytest.mark.slow
def test_a_student_and_its_sweep(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers alone, from processes that import torch again.
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: Costs(1))
    store = dumped_home(home, home / "a.zarr")
    words = ("--store", store, "--vocab", home / "teacher", "--steps", 2, *STUDENT)
    (home / "sweep.toml").write_text(f"vocab = ['{home / 'teacher'}', '300']\n")
    some = ("--store", store, "--steps", 2, *STUDENT, "--grid", home / "sweep.toml")
    ok(student_sweep, *some, "--out", home / "sweep")
    check({"page": (home / "sweep" / "index.html").read_bytes()})
    ok(student_train, *words, "--out", home / "mine")
    plant(home / "mine")
    ok(student_train, "push", home / "mine", "user/mine")
    check(sent(hub, "models/user/mine"))
    ok(student_export, home / "mine", "--to", "torchscript", "--out", home / "mine" / "exported")
    check({each.name: each.read_bytes() for each in (home / "mine/exported").glob("*.*")})
