"""Shells complete what docs/cli.md says that they do: commands, options and their words."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.docs.pages import COMMANDS, ROOT


def completed(name: str, *words: str) -> set[str]:
    """Return what bash is offered for the last of the words behind a command."""
    line = " ".join([name, *words])
    asked = {variable(name): "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    result = CliRunner().invoke(COMMANDS[name], [], prog_name=name, env=asked)
    return {row.partition(",")[2] for row in result.stdout.splitlines()}


def variable(name: str) -> str:
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


def test_options_words_and_commands_are_completed() -> None:
    assert "--optimizer" in completed("student-train", "--opt")
    assert completed("student-train", "--optimizer", "la") == {"lamb"}
    assert "push" in completed("student-train", "pu")
    assert completed("feature-store", "push", "a.zarr", "me/it", "--pri") == {"--private"}
    assert "mixed-vocab" in completed("teacher-dump", "mix")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_script_that_the_page_names(name: str) -> None:
    result = CliRunner().invoke(
        COMMANDS[name], [], prog_name=name, env={variable(name): "zsh_source"}
    )
    assert f"compdef _{name.replace('-', '_')}_completion {name}" in result.stdout
    assert variable(name) in (ROOT / "docs/cli.md").read_text("utf-8")
