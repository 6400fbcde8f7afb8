"""Options as data: Python refuses what the command line refuses, and --help contains every
default."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from teachonce.downstream.cli import _task, main
from teachonce.downstream.mlm.scoring import train_seeds
from teachonce.downstream.options import OPTIONS, TASKS, DownstreamOptions
from teachonce.downstream.settings import FineTuneSettings, MlmSettings, SpeedSettings
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.qa import QA
from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech
from teachonce.support.errors import UserError
from tests.downstream.support import refused


def mlm(**values: Any) -> MlmSettings:
    return MlmSettings(model="m", train=[Path("a.txt")], out=Path("out"), **values)


def over_seeds(seeds: int) -> Any:
    return train_seeds(mlm(), seeds, {})


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (FineTuneSettings, "epochs", 0, "--epochs 0: expected at least 1"),
        (FineTuneSettings, "seeds", 0, "--seeds 0: expected at least 1"),
        (FineTuneSettings, "lr", 0.0, "--lr 0: expected a finite number above 0"),
        (FineTuneSettings, "lr", math.nan, "--lr nan: expected a finite number above 0"),
        (FineTuneSettings, "max_length", 7, "--max-length 7: expected at least 8"),
        (FineTuneSettings, "limit", 0, "--limit 0: expected at least 1"),
        (FineTuneSettings, "precision", "x", "--precision x: expected one of fp32, bf16"),
        (over_seeds, "seeds", 0, "--seeds 0: expected at least 1"),
        (mlm, "resume", "no", "--resume no: expected true or false"),
        (mlm, "vocab", "many", "--vocab many: expected a number of pieces, e.g. 30k or 512"),
        (mlm, "steps", 0, "--steps 0: expected at least 1"),
        (mlm, "mask_prob", 1.0, "--mask-prob 1: expected a share between 0 and 1"),
        (mlm, "evaluate_every", 0, "--evaluate-every 0: expected at least 1"),
        (mlm, "batch_size", 0, "--batch-size 0: expected at least 1"),
        (mlm, "precision", "fp16", "--precision fp16: expected one of fp32, bf16"),
        (SpeedSettings, "repeat", 0, "--repeat 0: expected at least 1"),
        (SpeedSettings, "batch_size", 2.5, "--batch-size 2.5: expected a whole number"),
        (PartsOfSpeech, "unseen_labels", "x", "--unseen-labels x: expected one of refuse, count"),
        (Classify, "per_class", 0, "--per-class 0: expected at least 1"),
        (Entities, "pieces", "last", "--pieces last: expected one of first, all"),
        (QA, "stride", -1, "--stride -1: expected at least 0"),
    ],
)
def test_python_refuses_what_the_command_line_refuses(
    make: Callable[..., Any], name: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError) as printed:
        make(**{name: value})
    assert str(printed.value) == message


def test_the_last_of_several_seeds_is_within_the_range() -> None:
    expected = "--seed 4294967295 with --seeds 2: the last seed would be 4294967296, above the"
    tuning = FineTuneSettings(seed=2**32 - 1, seeds=2)
    with pytest.raises(UserError, match=expected):
        train_seeds(mlm(seed=2**32 - 1), 2, {})
    with pytest.raises(UserError, match=expected):
        fine_tune(Classify(), "m", {}, tuning)


@pytest.mark.parametrize(
    "words", ["--epochs 0", "--lr 0", "--lr inf", "--max-length 7", "--stride -1", "--mask-prob 1"]
)
def test_the_command_line_refuses_a_value_before_all_else(words: str) -> None:
    assert refused("--task", "table", *words.split()).startswith(f"Error: {words}: expected ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mteb", "--task mteb: expected one of mlm, pos"),
        ("sts:X", "--task sts:X: expected one of"),
        ("table", "needs a RUN"),
        ("table x --seed 0", "does not take --seed"),
        ("classify", "needs --model, --train, --out"),
        ("qa --model m --train a.tsv --train b.tsv", "needs --out"),
        ("retrieval --model m", "--task retrieval needs --test, --out"),
        ("rerank --model m --test t --out o", "needs --candidates RUN or --candidates-by"),
        ("rerank --model m --test t --out o --candidates a --candidates-by b",
         "--candidates and --candidates-by contradict"),
        ("classify --model m --train a --out o --limit 1 --per-class 1",
         "--limit and --per-class contradict each other; give one"),
        ("classify --model m --train a --out o --text-column a --text-a-column b",
         "--text-column and --text-a-column contradict"),
        ("classify --model m --train a --out o --text-column a --text-b-column b",
         "--text-column and --text-b-column contradict"),
        ("speed --model m --text-column x", "needs --test"),
        ("speed --model m --test nowhere.txt", "nowhere.txt: no such file or folder"),
        ("speed --model m --text-column x --test a.txt", "needs --test, the table that has"),
        ("speed --model m --epochs 1", "does not take --epochs"),
        ("pos --stride 3", "does not take --stride"),
        ("pos RUN", "does not take a RUN"),
        ("retrieval --model m --test t --out o --depth 3", "does not take --depth"),
        ("lm --lr 1e-3", "--task lm does not take --lr; leave it out"),
        ("mlm --label-column x", "does not take --label-column"),
        ("pair --as-is --model m", "--task pair --as-is needs --test, --out"),
        ("mlm --as-is --model m", "--task mlm --as-is needs --test, --out"),
        ("qa --as-is --model m", "--task qa does not take --as-is"),
        ("pos --as-is --train a --dev b", "does not take --train, --dev; leave"),
        ("ner --as-is --seeds 1 --seed 0 --epochs 1 --lr 1 --limit 1",
         "ner --as-is does not take --seeds, --seed, --epochs, --lr, --limit; leave them out"),
        ("classify --as-is --save --per-class 2", "not take --save, --per-class"),
        ("ner --as-is --pieces all", "--task ner --as-is does not take --pieces"),
        ("pair --as-is --unseen-labels count", "--as-is does not take --unseen-labels"),
    ],
)  # fmt: skip
def test_what_a_task_needs_and_does_not_take(words: str, expected: str) -> None:
    assert expected in refused("--task", *words.split())


def test_every_option_has_tasks_and_needs_only_what_it_takes() -> None:
    for name, about in OPTIONS.items():
        assert about.scope & set(TASKS), name
        assert about.needed | about.several <= about.scope, name
        assert about.help.endswith("."), name


def test_what_was_given_decides_and_defaults_fill_up() -> None:
    words: dict[str, Any] = {"model": ("m",), "train": (Path("a"),), "out": Path("nowhere")}
    asked = DownstreamOptions("classify", **words, seed=0, lr=1e-3, text_column="sentence")
    assert asked.given() == {**words, "seed": 0, "lr": 1e-3, "text_column": "sentence"}
    assert asked.settings(FineTuneSettings, seeds=1) == FineTuneSettings(lr=1e-3, seeds=1)
    assert asked.columns() == {"text": "sentence"}


def test_help_tells_tasks_defaults_and_ranges() -> None:
    # a wide terminal, so that no line is broken at a hyphen
    printed = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=200).output.split())
    for words in (
        "--epochs INTEGER Train for N passes over the training examples. "
        "[default: mlm 1, fine-tuning 3; at least 1]",
        "--batch-size INTEGER Run batches of N sequences. "
        "[default: mlm 32, fine-tuning and speed 16; at least 1]",
        "--seed INTEGER Use this number as the (first) seed. [default: 0; 0 to 4294967295]",
        "[default: 128, qa 384, speed 512; at least 8]",
        "--evaluate-every INTEGER mlm: Validate and save a checkpoint every N steps. "
        "[default: a tenth of all steps, at most 500; at least 1]",
        "Train in this precision, or score in it with lm and lm-eval. [default: fp32]",
        "--limit INTEGER fine-tuning: Train on the first N examples. [at least 1]",
        "--train PATH Train on the examples of this file.",
    ):
        assert words in printed, words


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ({"task": "pos", "unseen_labels": "count"}, {"unseen_labels": "count"}),
        ({"task": "ner", "pieces": "all"}, {"unseen_labels": "refuse", "pieces": "all"}),
        (
            {"task": "classify", "per_class": 2, "label_column": "class"},
            {"columns": {"label": "class"}, "per_class": 2, "unseen_labels": "refuse"},
        ),
        ({"task": "pair", "score_column": "s"}, {"columns": {"score": "s"}}),
        ({"task": "sts", "text_b_column": "b"}, {"columns": {"text_b": "b"}}),
        ({"task": "qa", "stride": 0}, {"columns": {}, "stride": 0}),
    ],
)
def test_a_task_gets_its_own_options(words: dict[str, Any], own: dict[str, Any]) -> None:
    asked = DownstreamOptions(
        **words, model=("m",), train=(Path("a"),), out=Path("nowhere"), seed=3
    )
    task = _task(asked)
    assert (task.name, task.options()) == (words["task"], own)
