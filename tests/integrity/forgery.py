"""Forged stores with valid checksums: each is refused in one line, or read as before.

    python -m tests.integrity.forgery FOLDER h5|zarr SEED FIRST LAST      (one of the processes)

Processes with little memory and a time limit for each store forge stores one after another, read
each completely, and run a command on it. If a process ends, the store is named, and another process
continues.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
from click.testing import CliRunner

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, UserError, open_store
from teachonce.store.tools.show import sequence_facts
from teachonce.store.tools.stored_tokens import check_tokens
from tests.integrity.damage import problems, small_store
from tests.integrity.forged_hdf5 import forge_hdf5
from tests.integrity.forged_zarr import forge_zarr
from tests.integrity.support import limit_memory, memory_folder, remove
from tests.making.stores import copied

MEMORY = 2**30  # bytes that the process may use in addition to its memory at the start
SECONDS = 60  # processor time for one store; many times the time for a sound store
BATCH = 1000  # stores of one process
EACH = 4  # a command is also run on every N-th store
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect"}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}
LOOKS = {"open", "os.listdir", "os.scandir"}
# Files that Python itself may read at any time.
KNOWN = tuple(
    os.path.realpath(path)
    for path in (*sysconfig.get_paths().values(), *sys.path, "/proc", "/dev/null", "/usr")
    if path
)
HDF5, ZARR = "h5", "zarr"
FORGE: dict[str, Callable[[Path, random.Random, Path], str]] = {HDF5: forge_hdf5, ZARR: forge_zarr}
Hows = tuple[str, ...]
HOW = ("refused", "unchanged", "verified")
FORGERY = "tests.integrity.forgery"  # __name__ is __main__ in a process of its own
HEAD = ("forged stores", "refused", "read unchanged", "reported by verify", "failures", "seconds")


def everything(store: FeatureStore) -> dict[str, str]:
    """Return digests of all values in a store: records and batches, each file, each weight."""
    digest = hashlib.sha256()

    def add(*values: Any) -> None:
        for value in values:
            digest.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).data)

    for record in store:
        add(record.text.encode(), record.token_ids, record.offsets, record.special)
        for view in record.views:
            add(view.mask, view.spans, *view.hidden.values(), *view.attention.values())
            add(view.logits.ids, view.logits.logprobs, view.logits.rest, view.logits.log_partition)
    sequence_facts(store, 0)
    for batch in store.stream(batch_tokens=64):
        add(batch.index, batch.token_ids, *batch.attention.values())
        add(*(states.states() for states in batch.hidden.values()))
    optional = dict(store.teacher_files()) | dict(store.teacher_weights())
    check_tokens(store)
    store.close()
    digests = {name: hashlib.sha256(bytes(value)).hexdigest() for name, value in optional.items()}
    return digests | {"": digest.hexdigest()}


def outcome(path: Path) -> dict[str, str] | str:
    """Read a store; return digests of everything, `refused: ...`, or `WRONG: ...`."""
    try:
        return everything(open_store(path))
    except UserError as error:
        line = " ".join(str(error).split())
        return f"refused: {line}" if line else "WRONG: an error without a word"
    except BaseException as error:
        return f"WRONG: {type(error).__name__}: {error}"[:300]


def command(path: Path, chance: random.Random) -> str | None:
    """Run a command on a store; return the error in its ending, or None."""
    target = path.with_name(f"copy{chance.choice(['.h5', '.zarr'])}")
    words: list[Any] = chance.choice(
        [
            ["info", path], ["info", "--json", path], ["show", path, 0], ["repair", path],
            ["convert", path, target], ["merge", path, path, target],
        ]
    )  # fmt: skip
    done = CliRunner().invoke(feature_store, [str(word) for word in words])
    remove(*path.parent.glob("*copy*"), *path.parent.glob("*forged*.*.parts"))
    if done.exit_code in (0, 1) and isinstance(done.exception, SystemExit | None):
        return None if done.output.strip() else f"{words[0]} said nothing"
    return f"{words[0]} ended with {done.exit_code}: {done.exception!r}"[:300]


class Watch:
    """Ends this process if it leaves a folder, starts another process, runs code that a store
    names, or writes at all."""

    def __init__(self, folder: Path) -> None:
        self.known = (os.path.realpath(folder), *KNOWN)
        self.on = self.writes = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in LOOKS and isinstance(arguments[0], str | bytes | os.PathLike):
            self._look(event, arguments)
        if event in CHANGES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                self._look(event, (os.path.dirname(os.fsdecode(path)) or ".", *arguments))
        changes = event in CHANGES or (event == "open" and bool((arguments[2] or 0) & WRITES))
        if event in FORBIDDEN or (changes and not self.writes):
            self._end(event, arguments)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        real = os.path.realpath(os.fsdecode(arguments[0]))
        if not any(f"{real}/".startswith(f"{root}/") for root in self.known):
            self._end(event, arguments)

    def _end(self, event: str, arguments: tuple[Any, ...]) -> None:
        line = json.dumps({"forbidden": f"{event} {arguments}"[:300]})
        os.write(1, f"{line}\n".encode())  # a command is running, which has another sys.stdout
        os._exit(3)


def _outside(folder: Path) -> Path:
    """Make a folder that no reader may access: a pipe that nobody writes, and an HDF5 file."""
    outside = folder / "outside"
    outside.mkdir(exist_ok=True)
    if not (outside / "pipe").exists():
        os.mkfifo(outside / "pipe")
    with h5py.File(outside / "secret.h5", "w") as file:
        file["ids"] = np.arange(9)
    return outside


def bounded(seconds: int) -> None:
    """End this process after this processor time, or after a wait 20 times as long; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(20 * seconds)


def fuzz(folder: Path, ext: str, seed: int, first: int, last: int) -> dict[str, Any]:
    """Forge stores first..last; return the numbers refused and read, and the errors."""
    found: dict[str, Any] = {how: 0 for how in HOW} | {"wrong": []}
    inside, outside = folder / "inside", _outside(folder)
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    # the list of copies is written there, too
    os.environ["TEACHONCE_CACHE"] = str(inside / "cache")
    sound, forged = folder / f"sound.{ext}", inside / f"forged.{ext}"
    if not sound.exists():
        small_store(sound, parts=1, sequences=2, hidden=("mean",))
    expected, watch = outcome(sound), Watch(inside)
    assert isinstance(expected, dict), expected
    watch.known = (*watch.known, os.path.realpath(sound))
    limit_memory(MEMORY)
    for number in range(first, last):
        chance = random.Random(f"{ext} {seed} {number}")
        remove(*inside.iterdir())
        copied(sound, forged)
        print(f"{number}", file=sys.stderr, flush=True)
        what = FORGE[ext](forged, chance, outside)
        print(f"{number} {what}", file=sys.stderr, flush=True)
        bounded(SECONDS)
        watch.on = True
        how, result = _tried(forged, expected)
        if how in HOW and chance.randrange(EACH) == 0:
            watch.writes = True
            if wrong := command(forged, chance):
                how, result = "wrong", wrong
        watch.on = watch.writes = False
        bounded(0)
        if how in HOW:
            found[how] += 1
        else:
            found["wrong"].append(f"{ext} {number} {what}: {result}")
    return found


def _tried(forged: Path, expected: dict[str, str]) -> tuple[str, object]:
    """Classify a forged store as one of HOW or `wrong`; return the class and the values read."""
    result = outcome(forged)
    if isinstance(result, str):
        return "refused" if result.startswith("refused") else "wrong", result
    try:
        printed = problems(forged)
    except BaseException as error:
        return "wrong", f"verify: {type(error).__name__}: {error}"[:300]
    if result.items() <= expected.items():
        return "unchanged", result
    return "verified" if printed else "wrong", result  # for example, a list with fewer parts


def in_process(
    folder: Path, ext: str, seed: int, count: int, module: str = FORGERY, hows: Hows = HOW
) -> dict[str, Any]:
    """Run `fuzz` of a module in processes of its own. A forgery may crash a process: this is among
    `wrong`, and the next process continues after it."""
    total: Counter[str] = Counter(dict.fromkeys(hows, 0))
    wrong: list[str] = []
    first = 0
    while first < count:
        last = min(first + BATCH, count)
        words = map(str, (folder, ext, seed, first, last))
        process = [sys.executable, "-m", module, *words]
        # The first variable reports where it crashed. Without the second, each thread takes 64 MB
        # of address space, which is limited here.
        where = {**os.environ, "PYTHONFAULTHANDLER": "1", "MALLOC_ARENA_MAX": "2"}
        done = subprocess.run(process, capture_output=True, text=True, errors="replace", env=where)
        found = json.loads((done.stdout.splitlines() or ["{}"])[-1])
        if done.returncode or "wrong" not in found:
            at = next((ln for ln in reversed(done.stderr.splitlines()) if ln[:1].isdigit()), "")
            why = found.get("forbidden") or done.stderr[-2000:]
            wrong.append(f"{ext} {at}: the process ended with {done.returncode}: {why}")
            last = int(at.partition(" ")[0]) + 1 if at else last
        else:
            wrong += found.pop("wrong")
            total.update(found)
        first = last
        click.echo(f"{ext}: {last:,} of {count:,}; {wrong[-5:] or 'all as they must be'}", err=True)
    return {**total, "wrong": wrong}


def trial(hdf5: int, zarr: int, seed: int) -> tuple[list[list[object]], list[str]]:
    """Forge stores of both formats in parallel; return the rows of HEAD, and the errors."""
    with ThreadPoolExecutor() as threads:
        tried = [
            threads.submit(row, f"{count:,} {name}", ext, seed, count)
            for name, ext, count in (("HDF5", HDF5, hdf5), ("Zarr", ZARR, zarr))
            if count
        ]
    done = [each.result() for each in tried]
    return [cells for cells, _ in done], [line for _, wrong in done for line in wrong]


def row(
    name: str, ext: str, seed: int, count: int, module: str = FORGERY, hows: Hows = HOW
) -> tuple[list[object], list[str]]:
    """Return the table row for the counts from a module's `fuzz`, and the errors."""
    started = time.perf_counter()
    with memory_folder() as folder:
        found = in_process(folder, ext, seed, count, module, hows)
    seconds = f"{time.perf_counter() - started:.0f}"
    return [name, *(found[how] for how in hows), len(found["wrong"]), seconds], found["wrong"]


if __name__ == "__main__":
    place, extension, *numbers = sys.argv[1:]
    click.echo(json.dumps(fuzz(Path(place), extension, *map(int, numbers))))
