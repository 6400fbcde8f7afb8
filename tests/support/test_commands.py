"""What a command cannot parse: one line, exit code 2, the nearest name, where to look. --help has
grouped options, the ten most important first, and two examples."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from teachonce.support.click_types import LocalPath, Text
from teachonce.support.commands import GroupedCommand
from teachonce.support.console import CONTEXT
from tests.docs.pages import COMMANDS, ROOT, every, leaf, ours

LINES = [
    ("student-train --stor a.zarr", "--stor: no such option; did you mean --store?"),
    ("student-train --store", "--store requires an argument;"),
    ("student-train --store a.zarr --lr x", "--lr x: expected a number, such as 3 or 1e-3;"),
    ("teacher-dump", "--model is missing;"),
    ("teacher-dump --model m --codec exakt",
     "--codec exakt: did you mean exact? expected one of default, exact, small;"),
    ("feature-store convert a.zarr b.h5 --codec exakt",
     "--codec exakt: did you mean exact? expected one of exact, default, small;"),
    ("feature-store info", "PATH is missing;"),
    ("feature-store show a.zarr x", "NUMBER x: is not a valid integer;"),
    ("student-sweep --trials 0", "--trials: 0 is not in the range x>=1;"),
    ("student-export s", "--out is missing;"),
    ("student-predict s --bad", "--bad: no such option;"),
    ("downstream --tusk mlm", "--tusk: no such option; did you mean --task?"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), LINES)
def test_one_line(words: str, line: str) -> None:
    top, *arguments = words.split()
    found = CliRunner().invoke(COMMANDS[top], arguments, prog_name=top)
    *_, command = (name for name, _ in every(top, COMMANDS[top]) if words.startswith(name))
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr == f"Error: {line} `{command} --help` lists all options\n"


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_is_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    package = SCRIPTS[name].partition(":")[0].removesuffix(".cli")
    run = [sys.executable, "-m", package, "--help"]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    help = (
        CliRunner()
        .invoke(
            COMMANDS[name],
            ["--help"],
            prog_name=f"python -m {package}",
            terminal_width=78,  # click leaves 2 columns free
        )
        .stdout
    )
    assert printed == help and help.startswith(f"Usage: python -m {package} ")


def test_an_unknown_command_is_answered_by_the_nearest() -> None:
    top = "feature-store"
    found = CliRunner().invoke(COMMANDS[top], ["inof"], prog_name=top)
    assert found.exit_code == 2
    words = "Error: inof: no such command; did you mean info? expected one of convert, export, "
    assert found.stderr.startswith(words)
    assert found.stderr.endswith("verify; `feature-store --help` lists all options\n")


@pytest.mark.parametrize("top", COMMANDS)
def test_every_path_on_this_machine_refuses_a_url(top: str) -> None:
    for name, command in every(top, COMMANDS[top]):
        for each in (param for param in command.params if isinstance(param.type, click.Path)):
            with pytest.raises(click.BadParameter) as refused:
                each.type.convert("s3://me:secret@bucket/a", each, None)
            expected = "s3://bucket/a: is a URL, expected a path on this machine"
            assert expected in refused.value.message, (name, each.name)


@pytest.mark.parametrize("top", COMMANDS)
def test_an_empty_word_is_not_taken_for_a_missing_option(top: str) -> None:
    for name, command in every(top, COMMANDS[top]):
        for each in (p for p in command.params if isinstance(p.type, Text | LocalPath)):
            if (name, each.name) == ("teacher-dump", "prompt"):  # the name of no prompt
                assert each.type.convert("", each, None) == ""
                continue
            with pytest.raises(click.BadParameter) as refused:
                each.type.convert("", each, None)
            assert refused.value.message.startswith("is empty"), (name, each.name)


RUNNABLE = {name: command for top in COMMANDS for name, command in every(top, COMMANDS[top])}
MANY = 12
LONG = {
    name: command
    for name, command in RUNNABLE.items()
    if sum(isinstance(param, click.Option) for param in command.params) > MANY
}


def test_the_long_commands_are_found() -> None:
    assert {"teacher-dump", "teacher-dump mixed-vocab", "downstream", "student-sweep"} <= set(LONG)


@pytest.mark.parametrize("name", sorted(LONG.keys() - {"student-sweep"}))
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


def test_help_of_a_sweep_names_each_option_and_explains_its_own() -> None:
    command = LONG["student-sweep"]
    output = command.get_help(click.Context(command, info_name="student-sweep", **CONTEXT))
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [option.opts[0] for option in options if option.opts[0] not in output] == []
    assert "\n  --trials " in output and "\n  --lr " not in output


@pytest.mark.parametrize("name", RUNNABLE)
def test_help_ends_in_two_examples_that_the_command_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = RUNNABLE[name]
    printed = command.get_help(click.Context(command, info_name=name, **CONTEXT))
    _, found, examples = printed.partition("Examples:\n")
    assert found, f"{name}: give it two examples (teachonce.support.commands.examples)"
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
