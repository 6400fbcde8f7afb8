"""Corpora that are edited during a dump: a finished store contains the text of its hash."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from teachonce.store import open_store
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.integrity.support import is_finished, save_teacher

LINES = 600
PART = 900  # tokens: about ten parts, which are written while the corpus is read
KINDS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", "hf")
WORDS = ("river", "story", "told", "long", "end", "why", "nobody", "knew", "the", "was")


def write(path: Path, lines: list[str]) -> None:
    """Write a corpus in the format of a suffix, one document a line."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=100)
        return
    rows = {".jsonl": [json.dumps({"text": line}) for line in lines]}
    header = ["text", *lines] if path.suffix in (".csv", ".tsv") else lines
    path.write_text("".join(f"{line}\n" for line in rows.get(path.suffix, header)))


def _over(path: Path, lines: list[str]) -> None:
    """Overwrite the old corpus in the same file."""
    new = path.with_name(f"new{path.suffix}")
    write(new, lines)
    with path.open("r+b") as file:
        file.write(new.read_bytes())
        file.truncate()
    new.unlink()


def _rename(path: Path, lines: list[str]) -> None:
    new = path.with_name(f"new{path.suffix}")
    write(new, lines)
    new.replace(path)


def _altered(lines: list[str], chance: random.Random) -> list[str]:
    place = chance.randrange(len(lines))
    return [*lines[:place], " ".join(chance.choices(WORDS, k=5)), *lines[place + 1 :]]


Write = Callable[[Path, list[str]], object]
Alter = Callable[[list[str], random.Random], list[str]]
EDITS: dict[str, tuple[Alter, Write]] = {
    "a line written over": (_altered, _over),
    "a line added": (lambda lines, chance: [*lines, "an end that was not there"], _over),
    "cut off": (lambda lines, chance: lines[: chance.randint(1, len(lines) - 1)], _over),
    "replaced by another file": (_altered, _rename),
    "touched": (lambda lines, chance: lines, lambda path, lines: os.utime(path)),
    "written again as it was": (lambda lines, chance: lines, _over),
    "removed": (lambda lines, chance: lines, lambda path, lines: path.unlink()),
}
HARMLESS = ("touched", "written again as it was")


@dataclass
class Edited:
    """One dump, in which an edit is made when `say` is called for the `moment`-th time."""

    path: Path
    edit: str
    moment: int
    chance: random.Random
    lines: list[str]
    called: int = field(default=0, init=False)
    now: list[str] = field(default_factory=list, init=False)  # the lines after the edit

    def say(self, line: str) -> None:
        self.called += 1
        if self.called == self.moment:
            alter, write_to = EDITS[self.edit]
            self.now = alter(self.lines, self.chance)
            write_to(self.path, self.now)


def edited(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Make `count` dumps with an edit of the corpus during each; yield the edit, and the result:
    `refused`, `sound`, or the error."""
    teacher, chance = save_teacher(folder / "teacher"), random.Random(seed)
    for number in range(count):
        kind, edit = chance.choice(KINDS), chance.choice(list(EDITS))
        limit = chance.choice([None, None, 3000])
        moment = chance.randint(1, 12)
        work = folder / str(number)
        work.mkdir()
        found = _dumped(teacher, work, kind, edit, moment, limit, chance)
        yield f"{kind}, {edit} at the {moment}. line, limit {limit}", found
        shutil.rmtree(work)


def _dumped(
    teacher: Path,
    work: Path,
    kind: str,
    edit: str,
    moment: int,
    limit: int | None,
    chance: random.Random,
) -> str:
    lines = [" ".join(chance.choices(WORDS, k=5)) + f" {n}" for n in range(LINES)]
    (work / "text").mkdir()
    path = work / "text" / f"train{'.jsonl' if kind == 'hf' else kind}"
    write(path, lines)
    corpus = f"hf:{work / 'text'}" if kind == "hf" else str(path)
    before = Corpus.open([corpus]).identity()
    trial = Edited(path, edit, moment, chance, lines)
    options = DumpOptions(
        model=str(teacher), out=work / "store.zarr", corpus=(corpus,), limit=limit, logits="none",
        attention="none", part_tokens=PART, device="cpu", precision="fp32",
    )  # fmt: skip
    try:
        dump(options, trial.say)
    except UserError as error:
        if edit in HARMLESS:
            return f"an edit that changes nothing was refused: {error}"
        return "sealed" if is_finished(work / "store.zarr") else "refused"
    with closing(open_store(options.out)) as store:
        texts, identity = list(store.texts()), store.identity["corpus"]
    # an edit before the first reading has no effect
    lines = lines if identity == before else trial.now
    if identity not in (before, Corpus.open([corpus]).identity() if path.exists() else before):
        return "tells a hash that no version has"
    return "sound" if texts == lines[: len(texts)] and texts else "holds other text than it tells"
