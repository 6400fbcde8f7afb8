"""Examples of tasks, cut out of public data, to fine-tune and score masked LMs by."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.results import SHARED
from benchmarks.reproduce.source import Task, Work
from teachonce.support.errors import UserError

DATA = SHARED / "data"
CHOSEN, SCORED = 200, 400  # examples to choose the epoch by, and to score, at most
EPOCHS = "8"  # until the chosen one is not the last
PARTS = ("train", "dev", "test")


@dataclass(frozen=True)
class Data:
    """Examples of a task for the small size.

    title, figure: as in `Task`. name: of its files. task: of `downstream`.
    train, test: files of DATA; without a test file, a part of the training file is used.
    few, tested: the largest numbers of training and of test examples.
    words: further words of `downstream`, which take precedence.
    """

    title: str
    figure: str
    name: str
    task: str
    train: str
    test: str = ""
    few: int = 800
    tested: int = SCORED
    words: tuple[str, ...] = ()

    @property
    def scored(self) -> Task:
        """Return the task that fine-tunes and scores a model with these examples."""
        files = [
            word for part in PARTS for word in (f"--{part}", f"{{work}}/{self.name}.{part}.tsv")
        ]
        length = ("--epochs", EPOCHS, "--seeds", "1", "--seed", "{seed}")
        # A part may lack rare labels.
        unseen = () if self.task == "sts" else ("--unseen-labels", "count")
        words = ("--task", self.task, *files, *length, *unseen, *self.words)
        return Task(self.title, self.figure, words)

    def cut(self, folder: Path) -> None:
        """Write NAME.train.tsv, NAME.dev.tsv and NAME.test.tsv, of other examples each."""
        tagged = self.task in ("pos", "ner")
        head, examples = _examples(DATA / self.train, tagged)
        random.Random(0).shuffle(examples)
        if self.test:
            _, test = _examples(DATA / self.test, tagged)
            random.Random(0).shuffle(test)  # sorted by label, the first would be of a few alone
        else:
            count = min(self.tested, len(examples) // 5)
            test, examples = examples[:count], examples[count:]
        parts = {
            "dev": examples[:CHOSEN],
            "train": examples[CHOSEN:][: self.few],
            "test": test[: self.tested],
        }
        for part, rows in parts.items():
            text = ("\n\n" if tagged else "\n").join([*head, *rows]) + "\n"
            (folder / f"{self.name}.{part}.tsv").write_text(text, "utf-8")


def _examples(path: Path, tagged: bool) -> tuple[list[str], list[str]]:
    text = path.read_text("utf-8").strip()
    if tagged:
        text = re.sub(r"(?m)^#\tbook_.*\n", "", text)  # names of documents, in factRuEval
        return [], text.split("\n\n")
    head, *rows = text.splitlines()
    return [head], rows


def cut_all(data: Sequence[Data], work: Work) -> None:
    """Write the examples of all tasks into the folder of a reproduction."""
    for entry in data:
        work.steps.write(functools.partial(entry.cut, work.folder))


def of_files(
    title: str,
    figure: str,
    name: str,
    task: str,
    *words: str,
    ending: str = "tsv",
    dev: bool = True,
) -> Task:
    """Return a task of the full size, with the user's own files NAME.train, NAME.dev, NAME.test."""
    files = [
        word
        for part in PARTS
        if dev or part != "dev"
        for word in (f"--{part}", f"{{data}}/{name}.{part}.{ending}")
    ]
    length = ("--seeds", "1", "--seed", "{seed}")
    return Task(title, figure, ("--task", task, *files, *length, *words))


def check_files(work: Work, tasks: Sequence[Task], *further: str) -> None:
    """Raise UserError if the user's data folder lacks a file."""
    paths = [word for task in tasks for word in task.words if word.startswith("{data}/")]
    for name in (*(word.removeprefix("{data}/") for word in paths), *further):
        if not (work.data / name).is_file():
            raise UserError(
                f"--data {work.data}: there is no {name}; benchmarks/reproduce/README.md lists"
                " its files"
            )
