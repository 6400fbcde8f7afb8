"""`teacher-dump` with bad input prints one line with the cause and the remedy, and changes
nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok, refused, says, tree
from tests.making.models import Teachers

MB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, tiny_teacher: Teachers) -> Path:
    """Copy a teacher, to be damaged."""
    return Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "teacher"))


# the kind of teacher


def headless(folder: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(folder)


def slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "CanineTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mystery"}')


def more_pieces(folder: Path) -> None:
    """Save a teacher whose tokenizer has more tokens than its embedding table."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"added{n}" for n in range(50)])
    tokenizer.save_pretrained(folder)


SPOILED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "unknown family": (unknown_family, (), ("mystery",)),
    "more pieces than rows": (more_pieces, (), ("its tokenizer has ids up to", "resize")),
    "slow tokenizer": (slow, (), ("CanineTokenizer", "offsets", "tokenizer.json")),
    "nothing left": (
        headless,
        ("--hidden", "none", "--attention", "none"),
        ("no LM head", "nothing to dump"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILED)
def test_teacher(tmp_path: Path, folder: Path, corpus: Path, case: str) -> None:
    spoil, more, words = SPOILED[case]
    spoil(folder)
    out = tmp_path / "out.zarr"
    says(refused(teacher_dump, "--model", folder, "--corpus", corpus, "--out", out, *more), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_corpus(tmp_path: Path, tiny_teacher: Teachers) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"plain\n" * 5000 + "schön\n".encode("latin-1"))
    words = ("--model", tiny_teacher("bert"), "--corpus", path, "--out", tmp_path / "out.zarr")
    line = refused(teacher_dump, *words)
    says(line, "text.txt", "line 5001", "not UTF-8", "iconv")
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


LATER = {  # test_early_errors.py has the refusals before torch is loaded
    "--attention layer:0": ("--attention", "layer:0"),
    "--attention mean:0": ("--attention mean:0", "layer 0", "count from 1"),
    "--max-length 16 --stride 15": ("--stride 15", "0 to 13"),
    "--device cuda": ("--device cuda", "use --device cpu"),
}


@pytest.mark.parametrize("options", LATER)
def test_dump_options(tmp_path: Path, tiny_teacher: Teachers, corpus: Path, options: str) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out", tmp_path / "out.zarr")
    says(refused(teacher_dump, *words, *options.split()), *LATER[options])
    assert list(tmp_path.iterdir()) == []


def test_out_exists(
    tmp_path: Path,
    tiny_teacher: Teachers,
    corpus: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused before the teacher runs: a big one takes minutes to calibrate."""
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out")
    (tmp_path / "file.zarr").write_text("mine")
    (tmp_path / "file.h5").write_text("mine")
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "folder.zarr" / "mine").write_text("mine")
    before, sealed = tree(tmp_path), tree(store)
    monkeypatch.setattr("teachonce.teacher_dump.teacher.teacher.Teacher.run", lambda *_: 1 / 0)
    says(refused(teacher_dump, *words, store, "--seed", 1), "exists already", "another name")
    for name in ("file.zarr", "file.h5", "folder.zarr"):
        says(refused(teacher_dump, *words, tmp_path / name), name, "exists", "another name")
    assert (tree(tmp_path), tree(store)) == (before, sealed)


def test_weights_beyond_float16_are_reported_as_such(
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
