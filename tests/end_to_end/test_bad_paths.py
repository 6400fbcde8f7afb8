"""Invalid paths, and paths that are not files, give one line with the path, for every option."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import StoreError, open_store
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok, refused, says
from tests.making.models import Teachers

LONG = "n" * 300  # a file system allows 255 bytes
STRANGER = "~nosuchuser"

WORDS: dict[str, tuple[click.Command, str]] = {
    "model": (teacher_dump, "--model PATH --corpus {text} --out {here}/a.zarr"),
    "corpus": (teacher_dump, "--model {model} --corpus PATH.txt --out {here}/a.zarr"),
    "out": (teacher_dump, "--model {model} --corpus {text} --out PATH.zarr"),
    "info": (feature_store, "info PATH.zarr"),
    "verify": (feature_store, "verify PATH.h5"),
    "repair": (feature_store, "repair PATH.zarr"),
    "convert": (feature_store, "convert PATH.zarr {here}/b.h5"),
    "merge": (feature_store, "merge PATH.h5 {text} {here}/b.h5"),
    "store": (student_train, "--store PATH.zarr --vocab 5k --out {here}/s"),
    "checkpoint": (downstream, "--task mlm --model PATH --train {text} --out {here}/s"),
    "train": (downstream, "--task mlm --model {model} --train PATH --out {here}/s"),
    "new": (downstream, "--task mlm --model {model} --train {text} --out PATH"),
}


def refused_path(option: str, path: str, text: Path, model: Path, here: Path) -> str:
    """Return the error line for a path in place of PATH, in a command whose text and model
    exist."""
    text.write_text("Some words.\n" * 30)
    command, words = WORDS[option]
    filled = words.format(text=text, model=model, here=here).replace("PATH", path)
    return refused(command, *filled.split())


@pytest.mark.parametrize("option", WORDS)
def test_a_name_that_is_too_long(tmp_path: Path, tiny_teacher: Teachers, option: str) -> None:
    known = (tmp_path / "text.txt", tiny_teacher("bert"), tmp_path)
    says(refused_path(option, str(tmp_path / LONG), *known), LONG, "too long")
    assert os.listdir(tmp_path) == ["text.txt"]


@pytest.mark.parametrize("option", ["model", "corpus", "checkpoint"])
def test_the_home_of_an_unknown_user(tmp_path: Path, tiny_teacher: Teachers, option: str) -> None:
    known = (tmp_path / "text.txt", tiny_teacher("bert"), tmp_path)
    says(refused_path(option, f"{STRANGER}/x", *known), STRANGER, "no such")


@pytest.mark.parametrize("option", ["model", "checkpoint", "new"])
def test_a_folder_of_a_model_whose_name_is_not_utf8(
    tmp_path: Path, tiny_teacher: Teachers, option: str
) -> None:
    """tokenizers and safetensors cannot use it. Corpora and stores with such names work."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(tiny_teacher("bert"), folder / "model")
    known = (folder / "text.txt", tiny_teacher("bert"), tmp_path)
    line = refused_path(option, str(folder / "model"), *known)
    says(line, r"\xff/model: the name is not UTF-8", "choose another")


def test_a_student_in_a_folder_whose_name_is_not_utf8(store: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    words = ("--vocab", "300", "--student", "16x2x2", "--steps", "2")
    shutil.copytree(store, there := folder / "store.zarr")
    line = refused(student_train, "--store", there, *words)  # its folder would be next to the store
    says(line, "the name is not UTF-8")
    assert os.listdir(folder) == ["store.zarr"]
    ok(student_train, "--store", there, *words, "--out", tmp_path / "student")


COMMANDS = {
    "teachonce.teacher_dump.cli": "--model m --corpus c.txt --out s.zarr",
    "teachonce.student_train.cli": "--store s.zarr",
    "teachonce.student_train.sweep": "--store s.zarr",
    "teachonce.downstream.cli": "--task mlm --model m --train c.txt --out o",
    "teachonce.feature_store.cli": "verify s.zarr",
}


def test_python_without_docstrings_is_refused() -> None:
    """With -OO transformers would fail in the middle of its imports."""
    code = (
        "import importlib\n"
        f"for module, words in {COMMANDS}.items():\n"
        "    try:\n"
        "        importlib.import_module(module).main(words.split())\n"
        "    except SystemExit as end:\n"
        "        print(end.code)"
    )
    call = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * len(COMMANDS)
    lines = done.stderr.splitlines()
    assert len(lines) == len(COMMANDS)
    for line in lines:
        says(line, "Python runs with -OO", "run it without")


def test_a_pipe_is_no_store(tmp_path: Path, tiny_teacher: Teachers) -> None:
    pipe, text = tmp_path / "pipe.h5", tmp_path / "text.txt"
    os.mkfifo(pipe)
    text.write_text("Some words.\n")
    for name in ("info", "verify"):
        says(refused(feature_store, name, pipe), "pipe.h5", "not a feature store")
    says(refused(feature_store, "repair", pipe), "pipe.h5", "not a folder or an ordinary file")
    words = ("--model", tiny_teacher("bert"), "--corpus", text, "--out", pipe)
    says(refused(teacher_dump, *words), "pipe.h5", "ordinary file; give another name")


def test_what_the_system_refuses_is_a_store_error_in_python(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"File name too long; check the name"):
        open_store(tmp_path / LONG)
