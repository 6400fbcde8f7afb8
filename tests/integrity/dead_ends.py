"""Any item of a store is emptied, lost, truncated or doubled: the advised commands repair it."""

import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import click
import h5py
import numpy as np
from click.testing import CliRunner

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import StoreWriter
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job import parts as job
from teachonce.teacher_dump.job.parts import gathered
from teachonce.teacher_dump.windows.window import Window
from tests.integrity.damage import FORMATS
from tests.integrity.support import content_of, memory_folder, remove, save_teacher
from tests.making.dumps import write_corpus
from tests.making.stores import copied

STATES = ("unfinished", "sealed", "merged", "converted")
STARTS = ("verify", "repair", "the command that made it", "show")
MOST_STEPS = 10
PART_TOKENS = 90
ENDINGS = (
    "sound without repair",
    "sound, with unknown items",
    "repaired",
    "rebuilt by its command",
    "beyond repair: rebuilt from scratch",
)
HEAD = ("store", "cases", *ENDINGS, "dead ends", "most commands in a case")
Words = tuple[str, ...]


class DeadEnd(Exception):
    """Advice that is missing, does not work, or leads in a circle."""


@dataclass(frozen=True)
class Scene:
    """A store in some state, and the command that made it."""

    path: Path
    state: str
    command: Words
    content: str

    @property
    def parts(self) -> Path:
        return self.path / "parts" if self.path.is_dir() else Path(f"{self.path}.parts")

    def copy_to(self, folder: Path) -> "Scene":
        """Copy the store and the files next to it to another folder."""
        for thing in (self.path, Path(f"{self.path}.parts")):
            if thing.exists():
                copied(thing, folder / thing.name)
        path = folder / self.path.name
        command = tuple(str(path) if word == str(self.path) else word for word in self.command)
        return Scene(path, self.state, command, self.content)


def typed(words: Words) -> tuple[int, str]:
    """Run a command; return its exit code and its last line. An exception is an error."""
    program: click.Command = {"teacher-dump": teacher_dump, "feature-store": feature_store}[
        words[0]
    ]
    with patch.object(job, "gathered", _small_parts):
        done = CliRunner().invoke(program, list(words[1:]))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise DeadEnd(f"{' '.join(words[:2])}: {type(done.exception).__name__}: {done.exception}")
    lines = [line for line in done.output.splitlines() if line.strip()]
    return done.exit_code, lines[-1] if lines else ""


def _small_parts(windows: Iterator[Window], _: int, limit: int | None) -> Iterator[list[Window]]:
    """Divide a small corpus into several parts, like a large one."""
    return gathered(windows, PART_TOKENS, limit)


def must(words: Words) -> None:
    code, line = typed(words)
    if code:
        raise RuntimeError(f"{' '.join(words)}: {line}")


def scenes(folder: Path, ext: str) -> Iterator[Scene]:
    """Make a store in each state, with the commands themselves and a tiny teacher."""
    save_teacher(folder / "teacher")
    dumps = []
    for number in (1, 2):
        corpus = write_corpus(folder / f"corpus{number}.txt", 3 + number)
        words: Words = ("teacher-dump", "--model", str(folder / "teacher"), "--corpus", str(corpus))
        words += ("--logits", "topk:4", "--hidden", "mean", "--views", "2")
        words += ("--mask-words", "rare", "--device", "cpu", "--precision", "fp32", "--out")
        dumps.append((*words, str(folder / f"dump{number}.{ext}")))
        must(dumps[-1])
    for state in STATES:
        path = folder / state / f"a.{ext}"
        path.parent.mkdir()
        sources = [dump[-1] for dump in dumps]
        command: Words = (*dumps[0][:-1], str(path))
        if state == "merged":
            command = ("feature-store", "merge", "--recode", *sources, str(path))
        elif state == "converted":
            command = ("feature-store", "convert", "--codec", "small", sources[0], str(path))
        if state == "unfinished":
            _unfinished(command)
        else:
            must(command)
        whole = sources[0] if state == "unfinished" else str(path)
        yield Scene(path, state, command, content_of(whole))


def _unfinished(command: Words) -> None:
    def killed(_: StoreWriter) -> None:
        raise UserError("killed")

    with patch.object(StoreWriter, "seal", killed):
        typed(command)


def advised(scene: Scene, line: str) -> Words:
    """Return the command that a line advises; remove whatever the line advises to remove first."""
    maker = "teacher-dump" if scene.command[0] == "teacher-dump" else " ".join(scene.command[:2])
    path = str(scene.path)
    if printed := re.search(r"or remove (it|what is there|\S+?)(?: and (\S+?))? (?:and|to) ", line):
        for thing in (path if printed[1] == "it" else printed[1], printed[2]):
            if thing and thing.startswith(path):
                remove(Path(thing))
    elif f"`feature-store repair {path}`" in line:
        return ("feature-store", "repair", path)
    elif f"`feature-store verify {path}`" in line:
        return ("feature-store", "verify", path)
    if (
        f"`{maker}`" not in line
        and "run the command again" not in line
        and "to start from scratch" not in line
    ):
        raise DeadEnd(f"no command of a {scene.state} store in: {line}")
    return scene.command


def follow(scene: Scene, start: str) -> tuple[str, int]:
    """Run the advised commands until the store is sound; return the ending, and the number of
    commands. Raises DeadEnd."""
    path, ending, line = str(scene.path), ENDINGS[0], ""
    words = ("feature-store", start, path) if start in ("verify", "repair") else scene.command
    words = ("feature-store", "show", path, "0") if start == "show" else words
    for step in range(1, MOST_STEPS + 1):
        code, line = typed(words)
        if words[1] == "verify" and not code:
            return _end(scene, ending, line), step
        if not code and (words == scene.command or words[1] == "show"):
            if words == scene.command and ending != ENDINGS[4] and scene.state != "unfinished":
                ending = ENDINGS[3]
            words = ("feature-store", "verify", path)
        elif not code and ("repaired: " in line or ": sound" in line):
            ending = ENDINGS[2] if "repaired: " in line else ending
            words = ("feature-store", "verify", path)
        else:
            if (
                "the rest of the store cannot repair this" in line
                or "to start from scratch" in line
            ):
                ending = ENDINGS[4]
            elif not code and words[1] == "repair" and "is not finished" not in line:
                ending = ENDINGS[3]
            words = advised(scene, line)
    raise DeadEnd(f"not sound after {MOST_STEPS} commands: {line}")


def _end(scene: Scene, ending: str, line: str) -> str:
    if content_of(scene.path) != scene.content:
        raise DeadEnd(f"other content than before: {line}")
    return ENDINGS[1] if "unknown item" in line and ending == ENDINGS[0] else ending


# --- damage -------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def damages(scene: Scene) -> dict[str, Damage]:
    """Return every damage of a kind that the store can have, by its description."""
    found: dict[str, Damage] = {}
    if scene.path.is_dir():
        names = _kinds(sorted(str(p.relative_to(scene.path)) for p in scene.path.rglob("*")))
        for name in names:
            found |= _of_file(scene.path, name)
    else:
        found |= _of_file(scene.path.parent, scene.path.name)
        if scene.parts.is_dir():
            for name in (scene.parts.name, f"{scene.parts.name}/1.h5"):
                found |= _of_file(scene.path.parent, name)
        for file in [scene.path, *sorted(scene.parts.glob("1.h5"))]:
            found |= _of_objects(scene.path.parent, file)
    return found


def _kinds(names: list[str]) -> list[str]:
    """Return the paths of one part, and of two of the teacher's weights: the others are similar."""
    weights = sorted({name.split("/")[2] for name in names if name.startswith("teacher/weights/")})
    kept = {*weights[:1], *weights[-1:], "zarr.json"}

    def is_kept(name: str) -> bool:
        top, second, *rest = [*name.split("/"), "", ""][:3]
        if top == "parts":
            return second in ("", "1", "zarr.json")
        return (top, second) != ("teacher", "weights") or rest[0] in ("", *kept)

    return [name for name in names if is_kept(name)]


def _of_file(folder: Path, name: str) -> dict[str, Damage]:
    """Return damages to a file, or to a folder with all of its content."""
    target = folder / name
    ways: dict[str, Callable[[Path], object]] = {"lost": remove, "doubled": _double}
    if target.is_dir():
        ways["emptied"] = _empty
    else:
        ways["emptied"] = lambda path: path.write_bytes(b"")
        ways["truncated"] = lambda path: os.truncate(path, path.stat().st_size // 2)
    if re.fullmatch(r"(.*/)?(1|1\.h5)", name):
        ways["doubled as part 7"] = lambda path: copied(path, path.with_name("7" + path.suffix))
    return {
        f"{name} {way}": lambda root, do=do: do(root / name)  # type: ignore[misc]
        for way, do in ways.items()
    }


def _empty(folder: Path) -> None:
    remove(*folder.iterdir())


def _double(path: Path) -> None:
    number = path.stem.isdecimal()
    copied(path, path.with_name(f"0{path.name}" if number else f"{path.name} copy"))


def _of_objects(folder: Path, file: Path) -> dict[str, Damage]:
    """Return damages to the groups and arrays of an HDF5 file."""
    names: list[str] = []
    with h5py.File(file) as opened:
        opened.visit(names.append)
        arrays = {name for name in names if isinstance(opened[name], h5py.Dataset)}
    inside, found = file.relative_to(folder), {}
    for name in _kinds(names):
        ways = ("emptied", "lost", "doubled", *(("truncated",) if name in arrays else ()))
        for way in ways:
            found[f"{inside}: {name} {way}"] = _in_hdf5(str(inside), name, way)
    return found


def _in_hdf5(file: str, name: str, way: str) -> Damage:
    def damage(root: Path) -> None:
        with h5py.File(root / file, "r+") as opened:
            parent, _, leaf = name.rpartition("/")
            group, thing = opened[parent or "/"], opened[name]
            if way == "doubled":
                opened.copy(thing, group, f"0{leaf}" if leaf.isdecimal() else f"{leaf} copy")
            elif way == "emptied" and isinstance(thing, h5py.Group):
                for inner in list(thing):
                    del thing[inner]
            else:
                rows = 0 if way == "emptied" else len(thing) // 2
                values = None if way == "lost" else np.asarray(thing[:rows])
                del group[leaf]
                if values is not None:
                    group.create_dataset(leaf, data=values)
        append_digest(root / file)

    return damage


# --- the trial ----------------------------------------------------------------------------------


def tried(
    folder: Path, ext: str, cases: int, seed: int, chosen: Collection[str] = ()
) -> Iterator[tuple[str, str, str, int]]:
    """Do `cases` damages (all at most, or the `chosen` ones) to a store in each state; yield the
    state, the damage, the ending or error, and the number of commands."""
    chance = random.Random(seed)
    (folder / ext).mkdir()
    for scene in scenes(folder / ext, ext):
        every = damages(scene)
        names = sorted(set(every) & set(chosen) if chosen else every)
        for name in chance.sample(names, min(cases, len(names))):
            start = chance.choice(STARTS)
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                copy = scene.copy_to(Path(inner))
                every[name](copy.path if ext == "zarr" else copy.path.parent)
                try:
                    ending, steps = follow(copy, start)
                except DeadEnd as error:
                    line = str(error).replace(inner, "")
                    ending, steps = f"{name}, then {start}: {line}", 0
            yield scene.state, name, ending, steps


def trial(cases: int | None, seed: int) -> tuple[list[list[object]], list[str]]:
    """Try `cases` damages of each store, or all; return the rows of HEAD, and the dead ends."""
    rows, wrong = list[list[object]](), list[str]()
    with memory_folder() as folder:
        for ext in FORMATS:
            counts: dict[str, Counter[str]] = {state: Counter() for state in STATES}
            most: Counter[str] = Counter()
            for state, _, ending, steps in tried(folder, ext, cases or 10**9, seed):
                counts[state][ending if ending in ENDINGS else "dead"] += 1
                most[state] = max(most[state], steps)
                if ending not in ENDINGS:
                    wrong.append(f"{ext}, {state}: {ending}")
                    click.echo(wrong[-1], err=True)
            for state, found in counts.items():
                endings = [found[ending] for ending in ENDINGS]
                row = [f"{state}, {ext}", found.total(), *endings, found["dead"], most[state]]
                rows.append(row)
    return rows, wrong
