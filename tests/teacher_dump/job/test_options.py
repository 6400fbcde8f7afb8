"""Options of a dump from Python are refused like on the command line, and have its defaults."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, assert_type

import click
import pytest

from teachonce.support.errors import UserError
from teachonce.support.options import options_of
from teachonce.teacher_dump.cli import _report, main
from teachonce.teacher_dump.job.dump import DumpSummary
from teachonce.teacher_dump.job.option_values import Shard, shard_of
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, StageOneDump
from tests.end_to_end.support import ok, refused

OUT = Path("store.zarr")
HUGE = "9" * 5000  # int() raises ValueError for more than 4,300 digits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "tiny"}, "--codec tiny: expected one of default, exact, small"),
        ({"mask_prob": 0.3}, "--mask-prob 0.3: no word is masked in view 0"),
        ({"plan": True, "shard": "0/2"}, "--plan and --shard: a plan covers a whole dump"),
        ({"plan": True, "ray": "local"}, "--plan and --ray: a plan covers a whole dump"),
        ({"head": "causal", "logits": "none"}, "--head causal and --logits none contradict"),
        ({"head": "none", "logits": "topk:8"}, "--head none and --logits topk:8 contradict"),
        ({"head": "causal", "views": 2}, "--views 2: a causal head reads no masked words"),
        ({"head": "classification", "stride": 3}, "--stride 3: for a classification head"),
        ({"head": "tagging", "logits": "head"}, "--logits head: applies to the logits of a"),
        ({"logits": f"topk:{HUGE}"}, "expected topk:K, sample:DRAWS"),
        ({"hidden": f"layer:{HUGE}"}, "unknown feature 'layer:9"),
        ({"shard": f"0/{HUGE}"}, "expected i/n"),
    ],
)
def test_python_refuses_what_the_command_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        DumpOptions("model", OUT, **changes)
    assert message in str(error.value)
    words = [word for name, value in changes.items() for word in _typed(name, value)]
    line = refused(main, "--model", "model", "--out", OUT, *words)
    if "codec" not in changes:  # click refuses a choice with its own message
        assert message in line


def test_parts_without_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="part_tokens 0: expected at least 1"):
        DumpOptions("model", OUT, part_tokens=0)


def test_python_takes_single_values_and_lists() -> None:
    made = DumpOptions(Path("model"), "s.zarr", corpus="a.txt,b.txt", hidden=["mean", "layer:3"])
    same = DumpOptions("model", Path("s.zarr"), corpus=("a.txt", "b.txt"), hidden="mean,layer:3")
    assert made == same
    assert DumpOptions("model", OUT, corpus=Path("a.txt")).sources() == ("a.txt",)
    assert_type(made.corpus, tuple[str, ...])  # as mypy reads it, which checks this file
    assert_type(made.hidden, str)
    with pytest.raises(UserError, match="^--corpus: is empty"):  # not the default corpus
        DumpOptions("model", OUT, corpus="")
    with pytest.raises(UserError, match="^--corpus 3: expected a string$"):
        DumpOptions("model", OUT, corpus=["a.txt", 3])  # type: ignore[list-item]
    assert DumpOptions("model", "s3://a/b.zarr").out == "s3://a/b.zarr"
    numbers: dict[str, Any] = {"limit": "50k", "views": "2", "mask_prob": "0.2"}
    made = DumpOptions("model", OUT, **numbers)
    assert (made.limit, made.mask_prob) == (50_000, 0.2)
    with pytest.raises(UserError, match="^--limit many: expected a whole number"):
        DumpOptions("model", OUT, **{**numbers, "limit": "many"})


def _typed(name: str, value: Any) -> tuple[str, ...]:
    return (_flag(name),) if value is True else (_flag(name), str(value))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_python_has_the_defaults_of_the_command_mixed_vocab() -> None:
    command = main.commands["mixed-vocab"]
    made: dict[str, Any] = {
        **vars(StageOneDump("m", OUT)),
        **vars(MixedVocabOptions(StageOneDump("m", OUT), width=8)),
    }
    message = {
        str(option.name): option for option in command.params if isinstance(option, click.Option)
    }
    seen = [
        name for name in message if not message[name].required and message[name].default is not None
    ]
    assert len(seen) > 12
    for name in seen:
        default = message[name].default
        if isinstance(default, (str, int, float)) or default is None:
            assert made[name] == default, name
    assert (made["logits"], made["hidden"], made["max_length"]) == ("none", "none", 128)
    assert made["weights"] is False and made["text_only"] is True


def test_mixed_vocab_takes_no_option_of_a_dump_alone() -> None:
    offered = {name for option in main.commands["mixed-vocab"].params for name in option.opts}
    alone: dict[str, Any] = {"views": 2, "stride": 4, "head": "mlm", "label_column": "x"}
    for name, value in alone.items():
        assert _flag(name) not in offered and name in options_of(StageOneDump)
        with pytest.raises(UserError, match=f"{_flag(name)} "):
            StageOneDump("m", OUT, **{name: value})
    with pytest.raises(UserError, match="expected the options of a StageOneDump"):
        MixedVocabOptions(DumpOptions("m", OUT), width=8)


def test_options_before_the_word_mixed_vocab_are_refused() -> None:
    line = refused(main, "--model", "m", "--out", OUT, "mixed-vocab", "--width", "8")
    assert "give the options after the subcommand mixed-vocab" in line
    assert "--width" in ok(main, "mixed-vocab", "--help")


@pytest.mark.parametrize("finished_before", [False, True])
def test_the_next_command_can_be_typed(
    finished_before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DumpOptions("model", Path("it's a/store.zarr"))
    done = DumpSummary(1, 1, 9, 1, "--vocab 5k", "", finished_before=finished_before)
    _report(options, done)
    words = shlex.split(capsys.readouterr().out.partition("next: ")[2])
    assert words == ["student-train", "--store", str(options.out), "--vocab", "5k"]


def test_which_of_several_processes_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard comes from `--shard`, or else from the variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert shard_of(None) is None and shard_of("2/4") == Shard(2, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert shard_of(None) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert shard_of(None) == Shard(3, 8) and shard_of("0/1") == Shard(0, 1)
