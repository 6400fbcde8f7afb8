"""What the demos share: their folder, the training of a student, and how they say what they do."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import click


@dataclass(frozen=True)
class Demo:
    """Holds the sizes of a demo, and the paths of its store and its student."""

    out: Path
    vocab: str
    student: str
    epochs: float
    every: int  # use one of this number of passages

    @property
    def store(self) -> Path:
        return self.out / "store.zarr"

    @property
    def folder(self) -> Path:
        """Return the folder of the student."""
        return self.out / "student"

    def clear(self) -> None:
        """Remove the files of an earlier demo from the folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        for folder in (self.store, self.folder):
            shutil.rmtree(folder, ignore_errors=True)

    def train(self, **extra: Any) -> None:
        """Train the student on the store; `extra` are further options of student-train."""
        from teachonce.student_train.arguments import checked_from
        from teachonce.student_train.output.run import run

        options = {
            "store": (str(self.store),),
            "out": self.folder,
            "vocab": self.vocab,
            "student": self.student,
            "epochs": self.epochs,
            "device": "cpu",
        }
        run(checked_from({**options, **extra}), say=say_detail)


def say(line: str) -> None:
    """Print a line, in bold unless it is indented."""
    click.secho(line, bold=not line.startswith(" "))


def say_detail(line: str) -> None:
    """Print a line of the dump or the training, indented."""
    say(indent(line, "   "))
