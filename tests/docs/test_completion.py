"""Shells complete the commands, options and values that docs/cli.md lists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from click.types import StringParamType

from tests.docs.pages import COMMANDS, ROOT

CLI = "teachonce.student_train.cli"


def completed(name: str, *words: str) -> set[str]:
    """Return the completions that bash offers for the last word of a command."""
    return {word for kind, word in answer(name, *words) if kind == "plain"}


def answer(name: str, *words: str) -> list[tuple[str, str]]:
    """Return all completions that bash receives for the last word: kinds and values."""
    line = " ".join([name, *words])
    asked = {variable(name): "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    result = CliRunner().invoke(COMMANDS[name], [], prog_name=name, env=asked)
    rows = (row.partition(",") for row in result.stdout.splitlines())
    return [(kind, word) for kind, _, word in rows]


def variable(name: str) -> str:
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


def test_options_words_and_commands_are_completed() -> None:
    assert "--optimizer" in completed("student-train", "--opt")
    assert completed("student-train", "--optimizer", "la") == {"lamb"}
    assert "push" in completed("student-train", "pu")
    assert completed("feature-store", "push", "a.zarr", "me/it", "--pri") == {"--private"}
    assert "mixed-vocab" in completed("teacher-dump", "mix")


FREE = {
    "repository",
    "push_to_hub",
    "revision",
    "message",
    "ray",
    "license",
    "language",
}  # names elsewhere
FREE |= {
    "text_column",
    "columns",
    "layers",
    "sequences",
    "texts",
    "prompt",
}  # file names of a store, table or user


def texts(command: click.Command) -> Iterator[click.Parameter]:
    """Yield the options with a text value, of a command and of its subcommands."""
    yield from (each for each in command.params if isinstance(each.type, StringParamType))
    for under in command.commands.values() if isinstance(command, click.Group) else ():
        yield from texts(under)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_text_is_completed(name: str) -> None:
    plain = {each.name for each in texts(COMMANDS[name]) if type(each.type) is StringParamType}
    assert plain <= FREE


def test_paths_are_the_shells_own_beside_words() -> None:
    """The type `file` lets bash complete files and folders if no listed word matches."""
    for words in (
        *(["student-train", "--store", "store.z"], ["teacher-dump", "--corpus", "no"]),
        *(["feature-store", "info", "store.z"], ["feature-store", "merge", "a.zarr", "b.z"]),
        *(["downstream", "--train", "tab"], ["student-train", "--recipe", "own.to"]),
    ):
        assert answer(*words) == [("file", words[-1])]
    assert answer("student-train", "--vocab", "te") == [("file", "te"), ("plain", "teacher")]
    assert answer("feature-store", "page", "a.zarr", "--vocab", "mix")[1] == (
        *("plain", "mixed-vocab"),
    )


def test_words_of_texts_are_completed() -> None:
    assert completed("student-train", "--align", "spa") == {"span"}
    assert completed("student-train", "--student", "t") == {"tiny", "teacher:"}
    assert completed("student-train", "--freeze", "words,pos") == {"words,positions"}
    assert completed("student-train", "--eval-every", "e") == {"epoch"}
    assert "hidden" in completed("student-sweep", "--loss", "hi")
    assert "minilm" in completed("teacher-dump", "--model", "mi")
    assert completed("downstream", "--task", "ret") == {"retrieval"}


NAMES = """
eval "$(_STUDENT_TRAIN_COMPLETE=bash_source student-train)"
compopt() { echo compopt "$@"; }
COMP_WORDS=(student-train --store store.z) COMP_CWORD=2
_student_train_completion student-train
echo "${#COMPREPLY[@]} words"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_falls_back_on_files(tmp_path: Path) -> None:
    command = tmp_path / "student-train"
    program = f"import sys; sys.argv[0] = 'student-train'; import {CLI} as c; c.main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", NAMES],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[:2] == ["compopt -o default", "0 words"], done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_script_that_the_page_names(name: str) -> None:
    result = CliRunner().invoke(
        COMMANDS[name], [], prog_name=name, env={variable(name): "zsh_source"}
    )
    assert f"compdef _{name.replace('-', '_')}_completion {name}" in result.stdout
    assert variable(name) in (ROOT / "docs/cli.md").read_text("utf-8")
