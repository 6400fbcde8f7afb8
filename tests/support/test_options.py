"""Options as data, and what a command line cannot parse.

- Options as data: the command line, TOML and Python accept and refuse the same values.
- What a command cannot parse: one line, exit code 2, the nearest name, where to look. --help has
  grouped options, the ten most important first, and two examples.
"""

import math
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from teachonce.downstream.options import DownstreamOptions
from teachonce.feature_store.captures.formats import ImportOptions
from teachonce.student_export.options import ExportOptions
from teachonce.student_predict.options import PredictOptions
from teachonce.student_train import TrainOptions
from teachonce.support.click_types import LocalPath, Text
from teachonce.support.commands import GroupedCommand
from teachonce.support.console import CONTEXT
from teachonce.support.errors import UserError
from teachonce.support.options import (
    INNER_SHARE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    at_least,
    click_option,
    click_options,
    click_type,
    default_of,
    option,
    options_of,
    parse_values,
    read_values,
    read_words,
    scoped,
)
from teachonce.teacher_dump import DumpOptions, MixedVocabOptions
from tests.docs.pages import COMMANDS, ROOT, every, leaf, ours


def _pairs(words: str | tuple[str, ...]) -> dict[str, float]:
    every = (words,) if isinstance(words, str) else words
    found = (word.partition("=") for each in every for word in each.split(","))
    return {name: float(weight) for name, _, weight in found}


@dataclass(frozen=True)
class Settings:
    store: str = option(help="Where.", required=True)
    kind: str = option("span", "Which.", choices=("span", "match"), scope={"stage"})
    rate: float | None = option(None, "How fast.", within=POSITIVE, default_text="by the width")
    share: float = option(0.5, "How much.", within=SHARE)
    steps: int = option(3, "How long.", within=at_least(1), scope={"stage", "length"})
    best: bool = option(False, "Keep the best.")
    parts: bool = option(False, "Take parts.", flag="--parts")
    out: Path | None = option(None, "Where to.")
    loss: Mapping[str, float] = option(
        factory=lambda: {"mlm": 1.0}, help="What.", repeated=True, read=_pairs
    )
    words: tuple[str, ...] = option((), "Which ones.", read=lambda text: tuple(text.split(",")))
    inner: tuple[str, ...] = field(default=())  # not an option

    def __post_init__(self) -> None:
        parse_values(self)


def _command() -> click.Command:
    @click.command(params=click_options(Settings))
    def command(**arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if value not in (None, ())}
        click.echo(repr(Settings(**read_words(Settings, given))))

    return command


def test_the_command_line_gives_what_python_gives() -> None:
    words = "--store s --kind match --rate 0.1 --steps 7 --best --out o --loss kl=2 --loss mlm=1"
    made = CliRunner().invoke(_command(), words.split())
    expected = Settings(
        "s", "match", 0.1, steps=7, best=True, out=Path("o"), loss={"kl": 2.0, "mlm": 1.0}
    )
    assert made.output.strip() == repr(expected)
    plain = CliRunner().invoke(_command(), ["--store", "s", "--parts"])
    assert plain.output.strip() == repr(Settings("s", parts=True))


def test_help_shows_choices_and_defaults() -> None:
    printed = " ".join(CliRunner().invoke(_command(), ["--help"]).output.split())
    assert "[span|match]" in printed and "[default: by the width]" in printed
    assert "--best / --no-best" in printed and "--parts" in printed and "--no-parts" not in printed
    assert CliRunner().invoke(_command(), []).exit_code == 2  # --store is required


def test_a_varied_option_is_given_once_for_each_setting() -> None:
    varied = [click_option(Settings, name, varied=True) for name in ("kind", "best", "loss")]

    @click.command()
    def command(**arguments: Any) -> None:
        click.echo(repr(arguments))

    command.params = [*varied]
    words = "--kind match --kind span --no-best --best --loss kl=1,mlm=1 --loss mlm=1"
    printed = CliRunner().invoke(command, words.split()).output
    assert printed.strip() == repr(
        {"kind": ("match", "span"), "best": (False, True), "loss": ("kl=1,mlm=1", "mlm=1")}
    )
    assert set(eval(CliRunner().invoke(command, []).output).values()) == {()}
    help = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "Which. [default: span]" in help and "Keep the best. [default: no-best]" in help


@pytest.mark.parametrize(
    ("settings", "given", "near", "command"),
    [
        (DumpOptions, "corpse", "corpus", "teacher-dump"),
        (MixedVocabOptions, "stepz", "steps", "teacher-dump mixed-vocab"),
        (TrainOptions, "losses", "loss", "student-train"),
        (DownstreamOptions, "modell", "model", "downstream"),
        (ExportOptions, "quantise", "quantize", "student-export"),
        (PredictOptions, "text", "texts", "student-predict"),
        (ImportOptions, "layer", "layers", "feature-store import"),
    ],
)
def test_an_unknown_option_from_python(
    settings: type[Any], given: str, near: str, command: str
) -> None:
    with pytest.raises(TypeError) as caught:
        settings("a", **{given: "b"})
    assert str(caught.value) == (
        f"{settings.__name__}: no option {given!r}; did you mean {near}? its fields are the options"
        f" of {command}"
    )


def _no_nose(parts: tuple[str, ...]) -> None:
    if "nose" in parts:
        raise UserError("--freeze nose: expected a part")


@dataclass(frozen=True)
class Checked:
    freeze: tuple[str, ...] = option((), "Parts.", read=lambda w: tuple(w.split(",")),
                                     check=_no_nose)  # fmt: skip

    def __post_init__(self) -> None:
        parse_values(self)


def test_an_option_with_a_check_of_its_own_is_refused_alike() -> None:
    assert Checked(("head", "words")).freeze == ("head", "words")
    with pytest.raises(UserError, match="^--freeze nose: expected a part$"):
        Checked(("nose",))
    with pytest.raises(UserError, match="^a.toml: --freeze nose: expected a part$"):
        read_values(Checked, {"freeze": ["head", "nose"]}, "a.toml", {"freeze"})


def test_toml_gives_what_python_gives() -> None:
    table = {"kind": "match", "rate": 1e-3, "steps": 2, "best": True, "loss": ["kl=1", "mlm=2"]}
    found = read_values(Settings, table, "a.toml", options_of(Settings))
    assert found == {**table, "loss": {"kl": 1.0, "mlm": 2.0}}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kind", "other", "--kind other: expected one of span, match"),
        ("rate", 0, "--rate 0: expected a finite number above 0"),
        ("rate", math.inf, "--rate inf: expected a finite number above 0"),
        ("rate", math.nan, "--rate nan: expected a finite number above 0"),
        ("share", 1.0, "--share 1: expected a share from 0 to below 1"),
        ("steps", 0, "--steps 0: expected at least 1"),
        ("steps", -(10**400), f"--steps {-(10**400)}: expected at least 1"),
        ("steps", 1.5, "--steps 1.5: expected a whole number"),
        ("steps", True, "--steps True: expected a whole number"),
        ("steps", None, "--steps None: expected a whole number"),
        ("best", 1, "--best 1: expected true or false"),
        ("kind", 3, "--kind 3: expected a string"),
        ("words", None, "--words None: expected a tuple"),
    ],
)
def test_python_refuses_what_no_option_takes(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as printed:
        Settings("s", **{name: value})
    assert str(printed.value) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "other"}, "'other': expected one of span, match"),
        ({"rate": 0}, "--rate 0: expected a finite number above 0"),
        ({"steps": "many"}, "'many': expected a whole number, such as 200, 50k or 2m"),
        ({"best": "perhaps"}, "'perhaps' is not a valid boolean"),
        ({"loss": {"mlm": 1}}, "loss: expected a string, a number or a list of strings"),
        ({"inner": "x"}, "unknown key 'inner'; expected one of best, kind"),
    ],
)
def test_toml_is_refused_with_its_place(table: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as printed:
        read_values(Settings, table, "a.toml, recipe x", options_of(Settings))
    assert str(printed.value).startswith("a.toml, recipe x: ") and expected in str(printed.value)


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    made = Settings(Path("s"), steps=np.int64(4), rate=np.float32(0.5))  # type: ignore[arg-type]
    assert (made.store, made.steps, made.rate) == ("s", 4, 0.5)
    assert (type(made.steps), type(made.rate)) == (int, float)  # JSON has no others


def _split(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(",".join(words).split(","))


@dataclass(frozen=True)
class Listed:
    files: tuple[str, ...] = option((), "Files.", repeated=True, read=_split)
    paths: tuple[Path, ...] = option((), "Paths.", repeated=True)
    sizes: tuple[int, ...] = option((), "Sizes.", read=lambda t: tuple(map(int, t.split(","))))
    kinds: str = option("a", "Kinds.")

    def __post_init__(self) -> None:
        parse_values(self)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"files": "a,b"}, ("a", "b")),
        ({"files": Path("a,b")}, ("a,b",)),  # a path, not a comma-separated list
        ({"files": ["a", Path("b,c")]}, ("a", "b,c")),
        ({"files": ("a,b",)}, ("a,b",)),  # as in a copy of the options
        ({"paths": "a"}, (Path("a"),)),
        ({"paths": ["a", Path("b")]}, (Path("a"), Path("b"))),
        ({"sizes": 3}, (3,)),
        ({"sizes": [3, 2]}, (3, 2)),
        ({"sizes": "3,2"}, (3, 2)),
        ({"sizes": ["3", "2"]}, (3, 2)),
        ({"kinds": ["a", "b"]}, "a,b"),
    ],
)
def test_python_takes_single_values_lists_and_words(given: dict[str, Any], expected: Any) -> None:
    (name,) = given
    assert getattr(Listed(**given), name) == expected


def test_words_of_python_match_the_command_line() -> None:
    words: dict[str, Any] = {"out": "o", "loss": ["kl=2", "mlm=1"], "words": "a,b"}
    made = Settings("s", **words)
    assert made == Settings("s", out=Path("o"), loss={"kl": 2.0, "mlm": 1.0}, words=("a", "b"))
    assert Settings("s", **words | {"loss": "kl=2,mlm=1"}) == made


def test_scopes_and_defaults() -> None:
    assert scoped(Settings, "stage") == {"kind", "steps"}
    assert scoped(Settings, "length") == {"steps"}
    assert default_of(Settings, "loss") == {"mlm": 1.0} and default_of(Settings, "store") is None
    assert "inner" not in options_of(Settings)


@given(st.floats())
def test_ranges_are_what_they_say(number: float) -> None:
    finite = math.isfinite(number)
    assert (number in POSITIVE) == (finite and number > 0)
    assert (number in NOT_NEGATIVE) == (finite and number >= 0)
    assert (number in SHARE) == (0 <= number < 1)
    assert (number in INNER_SHARE) == (0 < number < 1)


@pytest.mark.parametrize(
    ("word", "number"), [("50k", 50_000), ("1.5m", 1_500_000), ("2M", 2_000_000), ("7", 7)]
)
def test_counts_of_thousands_and_millions(word: str, number: int) -> None:
    assert click_type(Settings, "steps").convert(word, None, None) == number
    assert read_values(Settings, {"steps": word}, "here", ["steps"]) == {"steps": number}


@pytest.mark.parametrize("word", ["k", "1.2345k", "-3k", "5kk", "five", "9" * 30 + "k"])
def test_what_is_no_count(word: str) -> None:
    with pytest.raises(click.UsageError, match="expected a whole number, such as 200, 50k or 2m"):
        click_type(Settings, "steps").convert(word, None, None)


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
