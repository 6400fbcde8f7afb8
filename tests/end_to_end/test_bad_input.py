"""Bad input: one line that names the cause and the remedy, and nothing touched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from store.cli import main as feature_store
from store.errors import UserError
from store.writer import StoreWriter
from student_train.cli import main as student_train
from student_train.sweep import main as student_sweep
from teacher_dump.cli import main as teacher_dump
from teacher_dump.dump import dump
from tests.end_to_end.support import (
    ROOT,
    STUDENT,
    dump_options,
    dumped,
    invoke,
    ok,
    refused,
    tree,
    write_corpus,
)

MB = 1 << 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path], corpus: Path
) -> Path:
    folder = tmp_path_factory.mktemp("store")
    return dumped(tiny_teacher("bert"), corpus, folder / "store.zarr", hidden="mean,groups:2")


@pytest.fixture(scope="module")
def bare_store(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path], corpus: Path
) -> Path:
    """Draws alone: no states, no maps, no weights."""
    out = tmp_path_factory.mktemp("bare") / "bare.h5"
    more = {"logits": "sample:5", "hidden": "none", "attention": "none", "weights": False}
    return dumped(tiny_teacher("bert"), corpus, out, **more)


@pytest.fixture
def folder(tmp_path: Path, tiny_teacher: Callable[[str], Path]) -> Path:
    """A copy of a teacher, to be spoiled."""
    return Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "teacher"))


def says(line: str, *words: str) -> None:
    for word in words:
        assert word in line, line


# what the teacher is


def headless(folder: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(folder)


def slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "CanineTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mystery"}')


SPOILED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), (), ("no weights", "copy")),
    "no config": (lambda f: (f / "config.json").unlink(), (), ("no config.json", "give a folder")),
    "torn config": (lambda f: (f / "config.json").write_text("{"), (), ("teacher", "config.json")),
    "unknown family": (unknown_family, (), ("mystery",)),
    "torn weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 1000),
        (),
        ("teacher", "cannot be loaded"),
    ),
    "slow tokenizer": (slow, (), ("CanineTokenizer", "offsets", "tokenizer.json")),
    "no head": (headless, ("--head", "mlm"), ("no masked-LM head", "--head none")),
    "nothing left": (
        headless,
        ("--hidden", "none", "--attention", "none"),
        ("no LM head", "nothing to dump"),
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_teacher(tmp_path: Path, folder: Path, corpus: Path, case: str) -> None:
    spoil, more, words = SPOILED[case]
    spoil(folder)
    out = tmp_path / "out.zarr"
    says(refused(teacher_dump, "--model", folder, "--corpus", corpus, "--out", out, *more), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize("model", ["nobody/nothing", "./nowhere", "rubert-base"])
def test_unknown_teacher(tmp_path: Path, corpus: Path, model: str) -> None:
    line = refused(
        teacher_dump, "--model", model, "--corpus", corpus, "--out", tmp_path / "out.zarr"
    )
    says(line, "model", "no such folder", "check the")
    assert list(tmp_path.iterdir()) == []


# what the corpus is

CORPORA: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("empty", "give")),
    "blank": (b"\n \n\t\n", ("no text", "3 empty lines", "give another corpus")),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ("line", "binary", "UTF-8")),
    "latin-1": ("Ein schönes Büro.\n".encode("latin-1") * 9, ("not UTF-8", "Latin-1", "iconv")),
    "latin-1 far down": (
        b"plain\n" * 5000 + "schön\n".encode("latin-1"),
        ("line 5001", "not UTF-8", "iconv"),
    ),
    "utf-16": ("A text.\n".encode("utf-16"), ("UTF-16", "iconv")),
}


@pytest.mark.parametrize("case", CORPORA)
def test_corpus(tmp_path: Path, tiny_teacher: Callable[[str], Path], case: str) -> None:
    data, words = CORPORA[case]
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    line = refused(
        teacher_dump,
        *("--model", tiny_teacher("bert"), "--corpus", path, "--out", tmp_path / "out.zarr"),
    )
    says(line, "text.txt", *words)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_missing_corpus(tmp_path: Path, tiny_teacher: Callable[[str], Path]) -> None:
    for name, word in (("nowhere.txt", "no such file"), ("hf:nobody/nothing", "hf:nobody")):
        line = refused(
            teacher_dump,
            *("--model", tiny_teacher("bert"), "--corpus", name, "--out", tmp_path / "o.h5"),
        )
        says(line, name, word, "check" if name.startswith("hf:") else "hf:")
    assert list(tmp_path.iterdir()) == []


def test_one_line_of_200_megabytes(tmp_path: Path, tiny_teacher: Callable[[str], Path]) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        for _ in range(200):
            file.write(b"word " * (MB // 5))
    line = refused(
        teacher_dump,
        *("--model", tiny_teacher("bert"), "--corpus", path, "--out", tmp_path / "out.zarr"),
    )
    says(line, "huge.txt, line 1", "longer than 10,000,000 bytes", "one document on a line")
    assert [p.name for p in tmp_path.iterdir()] == ["huge.txt"]
    reading = (
        "import resource, sys\n"
        "from teacher_dump.corpus import Corpus, CorpusError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: Corpus.open([sys.argv[1]])\n"
        "except CorpusError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", reading, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) * 1024 < 60 * MB


# what a dump is asked for

DUMP_OPTIONS = {
    "--logits none --hidden none --attention none": ("all none",),
    "--logits topk:600": ("topk:600", "600 tokens", "fewer"),
    "--logits best": ("topk:K",),
    "--logits sample:0": ("sample:DRAWS",),
    "--head mlm --logits none": ("--head mlm", "--logits none"),
    "--hidden middle": ("middle", "groups:N"),
    "--hidden layer:9": ("layer:9", "0 (embeddings) to 4"),
    "--hidden groups:3": ("groups:3", "divisor of 4"),
    "--attention layer:0": ("--attention", "layer:0"),
    "--max-length 4000": ("--max-length 4000", "at most 128"),
    "--max-length 0": ("--max-length 0", "at least 4"),
    "--max-length 16 --stride 20": ("--stride 20", "0 to 13"),
    "--stride -1": ("--stride -1",),
    "--views 0": ("--views 0",),
    "--mask-prob 1.5": ("--mask-prob 1.5",),
    "--batch-tokens 0": ("--batch-tokens",),
    "--limit 0": ("--limit",),
    "--seed -1": ("--seed -1",),
    "--device cuda": ("--device cuda", "use --device cpu"),
    "--device toaster": ("--device toaster", "cpu"),
    "--codec best": ("--codec", "exact"),
    "--precision fp8": ("--precision", "bf16"),
    "--out out.tar": ("out.tar", ".zarr", ".h5"),
    "--out nowhere/out.zarr": ("nowhere", "does not exist"),
}


@pytest.mark.parametrize("options", DUMP_OPTIONS)
def test_dump_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_teacher: Callable[[str], Path],
    corpus: Path,
    options: str,
) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(tmp_path)
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out", "out.zarr")
    says(refused(teacher_dump, *words, *options.split()), *DUMP_OPTIONS[options])
    assert list(tmp_path.iterdir()) == []


def test_out_exists(
    tmp_path: Path,
    tiny_teacher: Callable[[str], Path],
    corpus: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before the teacher runs: a big one takes minutes to calibrate."""
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out")
    (tmp_path / "file.zarr").write_text("mine")
    (tmp_path / "file.h5").write_text("mine")
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "folder.zarr" / "mine").write_text("mine")
    before, sealed = tree(tmp_path), tree(store)
    monkeypatch.setattr("teacher_dump.teacher.Teacher.run", lambda *_: 1 / 0)
    says(refused(teacher_dump, *words, store), "exists already", "another name")
    for name in ("file.zarr", "file.h5", "folder.zarr"):
        says(refused(teacher_dump, *words, tmp_path / name), name, "exists", "another name")
    assert (tree(tmp_path), tree(store)) == (before, sealed)


# what a student is asked for

TRAIN_OPTIONS = {
    "--steps 5 --epochs 2": ("--steps and --epochs",),
    "--vocab 3": ("--vocab 3", "characters", "ask for more"),
    "--vocab 100k": ("--vocab 100000", "ask for at most"),
    "--vocab many": ("--vocab many", "5k"),
    "--vocab .": ("--vocab .", "tokenizer"),
    "--loss wishful=1": ("wishful", "mlm, kl"),
    "--loss kl=much": ("kl=much", "NAME=WEIGHT"),
    "--loss kl=0": ("--loss", "above 0"),
    "--loss kl=nan": ("--loss", "above 0"),
    "--student huge": ("--student huge", "HxLxA"),
    "--student 10x2x3": ("--student 10x2x3", "multiple of the 3 heads"),
    "--student 32x3x4 --loss hidden=1": ("groups2", "3 student layers", "--student"),
    "--init magic": ("--init magic", "svd, teacher"),
    "--init layers:1,9": ("layers:1,9", "2 numbers", "1 to 4"),
    "--init layers:one": ("layers:one", "layers:1,3,5"),
    "--student 32x6x4 --init teacher": ("6 student layers from 4", "--init svd"),
    "--view 1": ("--view 1", "views 0 to 0"),
    "--align sideways": ("--align", "span"),
    "--steps 0": ("--steps 0",),
    "--lr -1": ("--lr -1",),
    "--lr nan": ("--lr nan",),
    "--weight-decay -1": ("--weight-decay -1",),
    "--warmup 1": ("--warmup 1",),
    "--held-out 1": ("--held-out 1",),
    "--held-out 0.99": ("too few to hold out", "0.99"),
    "--max-length 0": ("--max-length 0",),
    "--seed -1": ("--seed -1",),
    "--device cuda": ("--device cuda", "use --device cpu"),
    "--device toaster": ("--device toaster", "cpu"),
    "--resume": ("nothing to resume", "leave --resume out"),
    "--out corpus.txt/student": ("corpus.txt", "--out"),
}


@pytest.mark.parametrize("options", TRAIN_OPTIONS)
def test_train_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path, corpus: Path, options: str
) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    shutil.copy(corpus, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--store", store, "--vocab", "500", "--out", "student", *STUDENT)
    steps = () if "epochs" in options or "steps" in options else ("--steps", "3")
    says(refused(student_train, *words, *steps, *options.split()), *TRAIN_OPTIONS[options])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--loss hidden=1", ("--loss hidden", "holds no hidden states")),
        ("--loss cosine=1", ("--loss cosine", "holds no hidden states")),
        ("--loss attention=1", ("--loss attention", "holds no attention maps")),
        ("--loss logit=1", ("--loss logit", "use kl")),
        ("--loss mlm=1", ("no teacher weights", "--init random")),
    ],
)
def test_store_lacks_what_is_asked_for(
    tmp_path: Path, bare_store: Path, options: str, words: tuple[str, ...]
) -> None:
    out = tmp_path / "student"
    line = refused(
        student_train,
        *("--store", bare_store, "--vocab", "500", "--out", out, *STUDENT, "--steps", "3"),
        *options.split(),
    )
    says(line, *words)
    assert not out.exists()


def test_student_exists(tmp_path: Path, store: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", "3", "--out")
    says(refused(student_train, *words, tmp_path), "exists already", "--out")
    says(refused(student_train, *words, tmp_path / "mine"), "exists already", "--out")
    says(refused(student_train, *words, tmp_path, "--resume"), "no training.json")
    assert tree(tmp_path) == {"mine": b"mine"}


# what the store is


def later_version(path: Path) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            file.attrs["version"] = 2
    else:
        root = json.loads((path / "zarr.json").read_text())
        root["attributes"]["version"] = 2
        (path / "zarr.json").write_text(json.dumps(root))


def truncated(path: Path) -> None:
    target = path if path.suffix == ".h5" else path / "zarr.json"
    target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])


def missing_part(path: Path) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["parts/1"]
    else:
        shutil.rmtree(path / "parts" / "1")


def flipped(path: Path) -> None:
    """One bit of the stored states of every part."""
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            places = [
                part["view0/hidden/mean/values"].id.get_chunk_info(0).byte_offset
                for part in file["parts"].values()
            ]
        targets = [(path, place + 9) for place in places]
    else:
        files = path.glob("parts/*/view0/hidden/mean/values/c/*/*")
        targets = [(file, 9) for file in files]
    assert len(targets) > 1
    for file, place in targets:
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)


STORES = {
    later_version: ("version 2", "reads version 1"),
    truncated: ("not ",),
    missing_part: ("parts/1", "damaged"),
    flipped: ("parts/", "hidden/mean/values", "feature-store verify"),
}


@pytest.mark.parametrize("ext", ["zarr", "h5"])
@pytest.mark.parametrize("spoil", STORES, ids=lambda spoil: spoil.__name__)
def test_store(tmp_path: Path, store: Path, spoil: Callable[[Path], None], ext: str) -> None:
    copy = tmp_path / f"copy.{ext}"
    ok(feature_store, "convert", store, copy)
    spoil(copy)
    before, out = tree(tmp_path), tmp_path / "student"
    line = refused(
        student_train,
        *("--store", copy, "--vocab", "500", "--out", out, *STUDENT, "--steps", "99"),
        *("--loss", "hidden=1"),
    )
    says(line, f"copy.{ext}", *STORES[spoil])
    if spoil is not flipped:  # that is found when the training comes to it
        assert tree(tmp_path) == before
    result = refused_by_verify(copy)
    says(result, f"copy.{ext}")


def refused_by_verify(path: Path) -> str:
    result = invoke(feature_store, "verify", str(path))
    assert result.exit_code == 1 and "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize("name", ["nowhere.zarr", "nowhere.h5", "corpus.txt", "empty.zarr"])
def test_no_store(tmp_path: Path, corpus: Path, name: str) -> None:
    shutil.copy(corpus, tmp_path)
    (tmp_path / "empty.zarr").mkdir()
    out = tmp_path / "student"
    line = refused(student_train, "--store", tmp_path / name, "--vocab", "500", "--out", out)
    says(line, name, "teacher-dump" if "nowhere" in name else "not a feature store")
    assert not out.exists()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_unfinished_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_teacher: Callable[[str], Path],
    corpus: Path,
    ext: str,
) -> None:
    path, out = tmp_path / f"store.{ext}", tmp_path / "student"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="killed here"):
        patch.setattr(StoreWriter, "seal", killed)
        dump(dump_options(tiny_teacher("bert"), corpus, path))
    before = tree(tmp_path)
    for command in (student_train, feature_store):
        words = ("--store", path, "--out", out) if command is student_train else ("info", path)
        says(refused(command, *words), "still being written", "teacher-dump", "same arguments")
    assert tree(tmp_path) == before


def killed(_writer: StoreWriter) -> None:
    raise UserError("killed here")


def test_tokenizer_folder(tmp_path: Path, store: Path, tiny_teacher: Callable[[str], Path]) -> None:
    """Without a mask token, and without a tokenizer at all."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher("bert"))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    (tmp_path / "bare").mkdir()
    for name in ("maskless", "bare"):
        line = refused(
            student_train,
            *("--store", store, "--vocab", tmp_path / name, "--out", tmp_path / "out", *STUDENT),
        )
        says(line, "--vocab", name, "tokenizer")
    assert not (tmp_path / "out").exists()


def test_full_disk(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before it stays, and the training goes on from there."""
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    out = tmp_path / "student"
    words = ("--store", store, "--vocab", "500", "--out", out, *STUDENT, "--steps", "4")
    words += ("--checkpoint-every", "1")
    with monkeypatch.context() as patch:
        patch.setattr("student_train.checkpoint.os.fsync", full)
        says(refused(student_train, *words), "student", "No space left on device", "--resume")
    assert [path.name for path in (out / "checkpoints").glob("*.pt")] == ["step-000000001.pt"]
    ok(student_train, *words, "--resume")


def test_sweep(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--out", tmp_path / "sweep", *STUDENT, "--steps", "2")
    wrong = ("--vocab", "500", "--loss", "mlm", "--loss", "wishful")
    says(refused(student_sweep, *words, *wrong), "wishful")
    assert not (tmp_path / "sweep").exists()  # told before the first student is trained
    says(refused(student_sweep, *words, "--vocab", "500", "--vocab", "3"), "--vocab 3", "ask for")
    says(refused(student_sweep, *words[2:], "--store", tmp_path / "nowhere.h5"), "nowhere.h5")


def test_address_without_out() -> None:
    line = refused(student_train, "--store", "memory://store.zarr", "--loss", "mlm", "--steps", "2")
    says(line, "memory://store.zarr", "--out")
