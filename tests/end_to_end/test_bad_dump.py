"""`teacher-dump` with bad input: one line that names the cause and the remedy, nothing touched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ROOT, ok, refused, says, tree

MB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, tiny_teacher: Callable[[str], Path]) -> Path:
    """A copy of a teacher, to be spoiled."""
    return Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "teacher"))


# what the teacher is


def headless(folder: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(folder)


def slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "CanineTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mystery"}')


def more_pieces(folder: Path) -> None:
    """A tokenizer that somebody has added to, beside a table of embeddings as it was."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"added{n}" for n in range(50)])
    tokenizer.save_pretrained(folder)


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
    "more pieces than rows": (more_pieces, (), ("its tokenizer has pieces up to", "resize")),
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
        "from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError\n"
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
    "--logits none --hidden none --attention none": (
        "--logits, --hidden",
        "all none",
        "request one",
    ),
    "--head none --hidden none --attention none": ("--head, --hidden", "all none", "request one"),
    "--logits topk:600": ("topk:600", "600 tokens", "fewer"),
    "--logits best": ("topk:K",),
    "--logits sample:0": ("sample:DRAWS",),
    "--logits topk:²": ("topk:²", "topk:K"),
    "--logits sample:70000": ("--logits sample:70000", "at most 65535"),
    "--head mlm --logits none": ("--head mlm", "--logits none"),
    "--hidden middle": ("middle", "groups:N"),
    "--hidden layer:9": ("layer:9", "0 (embeddings) to 4"),
    "--hidden groups:3": ("groups:3", "divisor of 4"),
    "--hidden groups:0": ("groups:0", "groups:N"),
    "--hidden groups:²": ("groups:²", "groups:N"),
    "--hidden layer:²": ("layer:²", "layer:I"),
    "--hidden none,mean": ("none,mean", "none cannot be combined with others"),
    "--hidden=": ("unknown feature ''", "mean"),
    "--text-column nope": ("--text-column nope", "corpus.txt", "no columns", "leave it out"),
    "--attention layer:0": ("--attention", "layer:0"),
    "--attention mean:0": ("--attention mean:0", "layer 0", "count from 1"),
    "--hidden mean:1": ("unknown feature 'mean:1'", "mean:0", "groups:N"),
    "--max-length 4000": ("--max-length 4000", "at most 128"),
    "--max-length 0": ("--max-length 0", "at least 4"),
    "--max-length 16 --stride 20": ("--stride 20", "less than --max-length 16"),
    "--max-length 16 --stride 15": ("--stride 15", "0 to 13"),
    "--stride -1": ("--stride -1",),
    "--views 0": ("--views 0",),
    "--mask-prob 1.5": ("--mask-prob 1.5",),
    "--mask-words rare": ("--mask-words rare", "--views 2"),
    "--views 2 --mask-words odd": ("--mask-words", "uniform", "rare"),
    "--batch-tokens 0": ("--batch-tokens",),
    "--limit 0": ("--limit",),
    "--seed -1": ("--seed -1",),
    "--device cuda": ("--device cuda", "use --device cpu"),
    "--device toaster": ("--device toaster", "cpu"),
    "--device cpu:": ("--device cpu:", "cuda:N"),
    "--device cuda:²": ("--device cuda:²", "cuda:N"),
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
    monkeypatch.setattr("teachonce.teacher_dump.teacher.teacher.Teacher.run", lambda *_: 1 / 0)
    says(refused(teacher_dump, *words, store), "exists already", "another name")
    for name in ("file.zarr", "file.h5", "folder.zarr"):
        says(refused(teacher_dump, *words, tmp_path / name), name, "exists", "another name")
    assert (tree(tmp_path), tree(store)) == (before, sealed)


def test_weights_beyond_float16_are_told_as_such(
    tmp_path: Path, folder: Path, corpus: Path
) -> None:
    """They are finite, and the teacher runs with them."""
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][-1, 0] = 1.5e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = ("--model", folder, "--corpus", corpus, "--out", tmp_path / "a.zarr", "--device", "cpu")
    line = refused(teacher_dump, *words)
    says(line, "teacher/weights/embeddings.word_embeddings.weight has the value 150000", "65504")
    assert line.endswith("leave the weights out (teacher-dump --no-weights)")
    ok(teacher_dump, *words, "--no-weights")
