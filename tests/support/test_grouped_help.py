"""--help of every command has grouped options, the ten most important first, and two examples."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from teachonce.support.console import CONTEXT
from teachonce.support.grouped_help import GroupedCommand
from tests.docs.pages import COMMANDS, every, leaf, ours

RUNNABLE = {name: command for top in COMMANDS for name, command in every(top, COMMANDS[top])}
MANY = 12
LONG = {
    name: command
    for name, command in RUNNABLE.items()
    if sum(isinstance(param, click.Option) for param in command.params) > MANY
}


def test_the_long_commands_are_found() -> None:
    assert {"teacher-dump", "teacher-dump mixed-vocab", "downstream", "student-sweep"} <= set(LONG)


@pytest.mark.parametrize("name", LONG)
def test_help_has_each_option_in_a_group_and_the_ten_that_matter_before_the_others(
    name: str,
) -> None:
    command = LONG[name]
    assert isinstance(command, GroupedCommand), f"{name}: give its options groups"
    grouped = [option for names in command.groups.values() for option in names]
    assert len(grouped) == len(set(grouped))
    options = {str(param.name) for param in command.params if isinstance(param, click.Option)}
    assert options - set(grouped) <= {"version"}, "name the group of a new option"
    assert len(command.groups["The ten that matter most"]) == 10
    context = click.Context(command, info_name=name, **CONTEXT)
    output = command.get_help(context)
    places = [output.index(f"\n{heading}:\n") for heading in command.groups]
    assert places == sorted(places)
    if isinstance(command, click.Group):
        assert output.index("\nCommands:") > places[-1]


@pytest.mark.parametrize("name", RUNNABLE)
def test_help_ends_in_two_examples_that_the_command_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = RUNNABLE[name]
    printed = command.get_help(click.Context(command, info_name=name, **CONTEXT))
    _, found, examples = printed.partition("Examples:\n")
    assert found, f"{name}: give it two examples (teachonce.support.grouped_help.examples)"
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for line in examples.splitlines()]
    assert len(lines) == 2
    for words in lines:
        assert words[: len(name.split())] == name.split()
        for word in words:  # an option may require that its file exists
            if Path(word).suffix in (".txt", ".tsv", ".npy"):
                Path(word).touch()
        parsed, rest = leaf(*(ours(words) or pytest.fail("no command of the package")))
        subcommands = command.commands if isinstance(command, click.Group) else {}
        assert parsed in (command, *subcommands.values())
        parsed.make_context(name, list(rest), **CONTEXT)
