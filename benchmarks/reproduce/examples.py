"""Examples of tasks, cut out of public data, to fine-tune and score masked LMs by."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.results import SHARED
from benchmarks.reproduce.arms import Task

DATA = SHARED / "data"
CHOSEN = {"small": 200, "full": 1000}  # examples to choose the epoch by
SCORED = {"small": 400, "full": 10**6}  # and to score, at most
EPOCHS = {"small": "8", "full": "3"}  # until the chosen one is not the last


@dataclass(frozen=True)
class Data:
    """Examples of a task: a name for its files, the `downstream --task`, and files of DATA; where
    there is none to test on, a part of those to train on. The small size trains on `few`."""

    measure: str
    name: str
    task: str
    train: str
    test: str = ""
    few: int = 800

    def file(self, part: str) -> str:
        """Name of the file with the examples of "train", "dev" or "test"."""
        return f"{self.name}.{part}.tsv"

    def cut(self, work: Path, size: str) -> None:
        """Write NAME.train.tsv, NAME.dev.tsv and NAME.test.tsv, of other examples each."""
        tagged = self.task in ("pos", "ner")
        head, examples = _examples(DATA / self.train, tagged)
        random.Random(0).shuffle(examples)
        chosen, scored = CHOSEN[size], SCORED[size]
        if self.test:
            _, test = _examples(DATA / self.test, tagged)
            random.Random(0).shuffle(test)  # sorted by label, the first would be of a few alone
        else:
            count = min(scored, len(examples) // 5)
            test, examples = examples[:count], examples[count:]
        parts = {
            "dev": examples[:chosen],
            "train": examples[chosen:][: self.few if size == "small" else None],
            "test": test[:scored],
        }
        for name, some in parts.items():
            text = ("\n\n" if tagged else "\n").join([*head, *some]) + "\n"
            (work / self.file(name)).write_text(text, "utf-8")

    def scoring(self, size: str, words: tuple[str, ...] = ()) -> Task:
        """With `words` of `downstream`, which win."""
        files = [
            word for name in ("train", "dev", "test")
            for word in (f"--{name}", f"{{work}}/{self.file(name)}")
        ]  # fmt: skip
        length = ("--epochs", EPOCHS[size], "--seeds", "1", "--seed", "{seed}")
        unseen = ("--unseen-labels", "count")  # a part may lack rare ones
        return Task(self.measure, ("--task", self.task, *files, *length, *unseen, *words))


def _examples(path: Path, tagged: bool) -> tuple[list[str], list[str]]:
    text = path.read_text("utf-8").strip()
    if tagged:
        text = re.sub(r"(?m)^#\tbook_.*\n", "", text)  # names of documents, in factRuEval
        return [], text.split("\n\n")
    head, *rows = text.splitlines()
    return [head], rows


def cut_all(data: Mapping[str, tuple[Data, ...]], work: Path, size: str) -> None:
    for each in data[size]:
        each.cut(work, size)


def scoring(
    data: Mapping[str, tuple[Data, ...]], small: tuple[str, ...] = ()
) -> dict[str, tuple[Task, ...]]:
    """Tasks of each size; those of the small one with these words of `downstream`, too."""
    own = {"small": ("--group-by-length", *small), "full": ()}
    return {
        size: tuple(each.scoring(size, own[size]) for each in some) for size, some in data.items()
    }
