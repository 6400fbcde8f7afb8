"""README and the site are correct, and shells complete what docs/cli.md lists.

- README and the site are correct: options exist, command lines parse, links resolve.
- Shells complete the commands, options and values that docs/cli.md lists.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from click.types import StringParamType

from teachonce.losses import Loss
from teachonce.student_train.losses.registry import loss_names
from teachonce.support.console import CONTEXT
from tests.docs.pages import COMMANDS, PAGES, ROOT, blocks_of, leaf, ours
from tests.making.environment import printed_by

OTHERS = {  # options of other programs that the pages name
    "docs/coming-from.md": {
        "--teacher_name", "--alpha_ce", "--alpha_mlm", "--alpha_cos", "--mlm_smoothing",
        "--target-layer-ids",
    },
    "docs/guide/processes.md": {"--standalone", "--nproc-per-node", "--no-python"},
    "docs/guide/recipes.md": {"--size", "--work", "--jobs", "--data", "--teacher", "--dry-run"},
    "docs/guide/captures.md": {"--target-layer-ids", "--dataloader-type"},
    "docs/start.md": {"--index-url"},
    "docs/guide/dump.md": {"--no-deps"},
    "docs/guide/share.md": {"--repo-type", "--local-dir", "--logdir"},
    "README.md": {"--ask"},
}  # fmt: skip
HELP = {"--help", "--version"}


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from options(each)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page: str) -> None:
    if page in ("docs/format.md", "docs/architecture.md"):
        pytest.skip("includes a file of the project")
    known = {option for command in COMMANDS.values() for option in options(command)} | HELP
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / page).read_text("utf-8")))
    others = OTHERS.get(page, set())
    assert named - others <= known
    assert others <= named, "no longer named there"


@pytest.mark.parametrize("page", PAGES)
def test_each_line_of_a_shell_parses(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in {"sh", "python", "toml", "text", "json"}, "not a known language"
        for words in block.commands() if block.language == "sh" else ():
            if found := ours(words):
                command, rest = leaf(*found)
                try:
                    with suppress(click.exceptions.Exit):  # --recipe list
                        command.make_context(words[0], list(rest), **CONTEXT)
                except click.BadParameter as error:  # a file that is not here
                    assert not isinstance(error, click.MissingParameter), words
                    assert "does not exist" in error.format_message(), (words, error)


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_to_them(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES if "docs/" in page}
    tables = (
        block
        for page in pages
        for block in re.findall(
            r"^```{toctree}\n(.*?)^```$", (ROOT / f"docs/{page}.md").read_text("utf-8"), re.M | re.S
        )
    )
    assert pages - {"index"} == set(re.findall(r"^([\w/-]+)$", "\n".join(tables), re.MULTILINE))


def test_the_page_of_defaults_has_the_commands_own() -> None:
    """Each value in the column of the page is contained in the default of the option's help."""
    rows = 0
    for part in re.split(r"(?m)^## ", (ROOT / "docs/defaults.md").read_text("utf-8")):
        name, _, text = part.partition("\n")
        for option, value in re.findall(r"(?m)^\| `(--[\w-]+)`.*? \| `(.+?)` \|", text):
            command = COMMANDS[name]
            (parameter,) = (each for each in command.params if option in each.opts)
            record = parameter.get_help_record(click.Context(command))
            shown = re.search(r"\[(?:env var.*; )?default: (.+)\]$", record[1] if record else "")
            assert shown, option
            for word in value.split(","):
                assert re.search(rf"(?<![\w=]){re.escape(word)}(?![\w.])", shown[1]), (option, word)
            rows += 1
    assert rows > 8


def test_every_loss_has_an_equation() -> None:
    text = (ROOT / "docs/losses.md").read_text("utf-8").partition("## Equations")[2]
    named = set(re.findall(r"`([a-z-]+)`", text.partition("## What")[0]))
    assert set(loss_names()) <= named


def test_every_optional_field_of_a_loss_is_documented() -> None:
    text = (ROOT / "docs/losses.md").read_text("utf-8").partition("| field |")[2]
    documented = set(re.findall(r"^\| `(\w+)` \|", text.partition("\n## ")[0], re.MULTILINE))
    optional = {field.name for field in fields(Loss) if field.default is not MISSING}
    assert documented == optional - {"parameter", "value"}  # only built-in losses have numbers


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


def test_the_shell_completes_paths_as_well_as_words() -> None:
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
    path = f"{tmp_path}:{os.environ['PATH']}"
    printed = printed_by("bash", "-c", NAMES, cwd=tmp_path, PATH=path, PYTHONPATH=str(ROOT))
    assert printed.split("\n")[:2] == ["compopt -o default", "0 words"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_script_that_the_page_names(name: str) -> None:
    result = CliRunner().invoke(
        COMMANDS[name], [], prog_name=name, env={variable(name): "zsh_source"}
    )
    assert f"compdef _{name.replace('-', '_')}_completion {name}" in result.stdout
    assert variable(name) in (ROOT / "docs/cli.md").read_text("utf-8")
