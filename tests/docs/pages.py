"""List the code blocks of the pages, and the blocks that are only parsed."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.student_export.cli import main as student_export
from teachonce.student_predict.cli import main as student_predict
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.teacher_dump.cli import main as teacher_dump

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, click.Command] = {
    "downstream": downstream,
    "feature-store": feature_store,
    "student-export": student_export,
    "student-predict": student_predict,
    "student-sweep": student_sweep,
    "student-train": student_train,
    "teacher-dump": teacher_dump,
}
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
)
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Holds a fenced block of a page. A comment above a block that does not run gives the
    reason."""

    language: str
    text: str
    run: bool

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each line of a shell, without comments."""
        for line in self.text.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in their order."""
    text = (ROOT / page).read_text("utf-8")
    return [Block(language, code, not kept) for kept, language, code in BLOCK.findall(text)]


def every(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and its subcommands, with their names."""
    yield name, command
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from every(f"{name} {below.name}", below)


def ours(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """Find the project's command in a line, also after a launcher, and its words."""
    for place, word in enumerate(words):
        if word in COMMANDS:
            return COMMANDS[word], words[place + 1 :]
    return None


def leaf(command: click.Command, words: list[str]) -> tuple[click.Command, list[str]]:
    """Follow a group to the command that the words name."""
    if isinstance(command, click.Group) and words and words[0] in command.commands:
        return leaf(command.commands[words[0]], words[1:])
    return command, words
