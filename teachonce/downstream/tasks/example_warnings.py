"""Prints warnings about the examples of a task: measures without a value, training texts that are
scored, predictions that are all equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from teachonce.downstream.tasks.task_interface import Task
from teachonce.support.console import counted

Say = Callable[[str], object]


def say_uncomputable(
    task: Task, files: Mapping[str, Path], splits: Mapping[str, Sequence[Any]], say: Say
) -> None:
    """Print the measures that have no value for a scored file, because its gold answers are all
    equal."""
    for name, examples in splits.items():
        gold = set(task.gold(examples))
        if name != "train" and (measures := task.uncomputable(gold)):
            same = f"all {task.noun}s of {files[name]} are {min(gold)!r}"
            say(f"{same}: {measures} cannot be computed")


def say_shared(
    task: Task, files: Mapping[str, Path], splits: Mapping[str, Sequence[Any]], say: Say
) -> None:
    """Print, for each scored file, how many of its examples are also training examples, if they are
    a tenth of the file or more."""
    trained = {tuple(task.texts([example])) for example in splits["train"]}
    for name, examples in splits.items():
        if name == "train":
            continue
        shared = sum(tuple(task.texts([example])) in trained for example in examples)
        if shared * 10 >= len(examples):
            say(
                f"{shared:,} of {counted(len(examples), 'example')} of {files[name]} have the text"
                " of a training example: scores on them are too high for new texts"
            )


def warn_if_constant(
    task: Task,
    splits: Mapping[str, Sequence[Any]],
    answers: Set[Any],
    remedy: str,
    say: Say,
    prefix: str = "",
) -> dict[str, str]:
    """Print a warning if all predictions are equal, but not all gold answers. Returns {"warning":
    text} after a warning, else {}.

    splits: the scored splits. answers: the set of predicted answers over all of them.
    """
    gold = {answer for examples in splits.values() for answer in task.gold(examples)}
    if not len(answers) == 1 < len(gold):
        return {}
    (same,) = answers
    same = f"{same:g}" if isinstance(same, float) else repr(same)
    warning = f"it has learnt nothing: every {task.noun} that it predicts is {same}; {remedy}"
    say(f"{prefix}{warning}")
    return {"warning": warning}
