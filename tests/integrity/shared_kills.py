"""One of several processes is killed: readers that share a disk cache, members of a sweep. The
others continue without errors; the same command trains the killed member."""

import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import click

from harness.processes import finish, fork
from teachonce.store import open_store
from teachonce.store.tools.copy import upload
from teachonce.support import files
from tests.integrity.damage import small_store
from tests.integrity.hard_places import COMMANDS, given_in, plainly, problem_of, typed
from tests.rough_network import BUCKET, KEYS, running_s3

HEAD = ("what", "kills", "as required", "failures", "seconds")
URL = f"s3://{BUCKET}/store.zarr"
READERS, BOUND = 3, 60_000  # bytes of the cache, fewer than the store has
SECONDS = 300.0  # seconds for a process that must end


def digest_of(path: str | Path, cache: str | None = None) -> str:
    """Stream a store, with a cache if given; return the SHA-256 of its texts and stored arrays."""
    found = hashlib.sha256()
    with closing(open_store(path, cache=cache)) as store:
        for batch in store.stream(seed=1):
            found.update("\0".join(batch.texts).encode())
            for name in sorted(batch.stored):
                found.update(batch.stored[name].tobytes())
    return found.hexdigest()


def read_often(environment: dict[str, str], cache: str, times: int) -> None:
    """Print the digest of the store behind URL `times` times."""
    os.environ.update(environment)
    for _ in range(times):
        print(digest_of(URL, cache), flush=True)


def taken(folder: Path) -> int:
    """Return the bytes of the entries in a cache's folder, while no process writes one."""
    with (folder / "lock").open("rb") as lock:
        files.lock(lock.fileno(), wait=True)
        return sum(each.stat().st_size for each in folder.iterdir() if each.name != "lock")


def killed_readers(folder: Path, kills: int, seed: int) -> Iterator[str]:
    """Kill one of READERS readers `kills` times; yield each error or "", and at the end the errors
    of the remaining readers."""
    chance, place = random.Random(seed), folder / "cache"
    sound = small_store(folder / "sound.zarr", parts=6, attention=())
    with running_s3() as s3:
        environment = KEYS | {"AWS_ENDPOINT_URL": s3.url}
        upload(sound, URL)
        expected, cache = digest_of(sound), f"disk:{place},{BOUND}"
        logs = [folder / f"{number}.log" for number in range(kills + READERS)]

        def start(number: int) -> Callable[[], int]:
            process = fork(read_often, environment, cache, 1000, log=logs[number])

            def kill() -> int:
                process.kill()
                return finish(process)

            return kill

        def wrong(number: int) -> str:
            lines = logs[number].read_text().splitlines()
            return next((f"a reader printed {line}" for line in lines if line != expected), "")

        running = {number: start(number) for number in range(READERS)}
        _wait(lambda: all(logs[number].stat().st_size for number in running))
        for number in range(READERS, READERS + kills):
            time.sleep(chance.random())
            chosen = chance.choice(list(running))
            problem = "" if taken(place) <= BOUND else "the cache is over its bound"
            if running.pop(chosen)() != -signal.SIGKILL:
                problem = problem or "a reader ended by itself"
            yield problem or wrong(chosen)
            running[number] = start(number)
        _wait(lambda: all(logs[number].stat().st_size for number in running))
        for number, kill in running.items():
            kill()
            if problem := wrong(number):
                yield problem


def killed_members(folder: Path, kills: int, seed: int) -> Iterator[str]:
    """Kill a student's process of a sweep of two, `kills` times; yield each error or "".

    The sweep must finish the other student and report the killed one, as when memory runs out; the
    same command must then finish both.
    """
    chance, given = random.Random(seed), given_in(folder)
    for number in range(kills):
        made, log = folder / str(number), folder / f"{number}.log"
        made.mkdir()
        yield _struck(given, made, log, chance.random())


def _struck(given: Path, made: Path, log: Path, pause: float) -> str:
    """Kill a process of a sweep `pause` s after its students start; return the error or ""."""
    sweep = COMMANDS["student-sweep"]
    words, out = sweep.words(given, made), made / sweep.out
    driver = fork(plainly, sweep.module, words, log=log)
    _wait(lambda: _members(out) or not driver.is_alive())
    time.sleep(pause)
    for struck in _members(out)[:1]:
        with suppress(ProcessLookupError):
            os.kill(struck, signal.SIGKILL)
    code, said = finish(driver), log.read_text("utf-8", "replace")
    states, problem = sorted(_states(out)), problem_of(said, code)
    if code and ("1 of 2 students failed" not in said or "was killed, probably" not in said):
        problem = problem or f"it says {said[-300:]}"
    if states != (["failed", "finished"] if code else ["finished"] * 2):
        problem = problem or f"its students are {states}"
    again = typed(sweep.module, words, log, plainly)
    if not again.endswith("exit code 0") or _states(out) != ["finished"] * 2:
        problem = problem or f"typed again: {again[-300:]}"
    return problem


def _members(out: Path) -> list[int]:
    """Return the processes that train a student of the sweep now."""
    found = []
    for lease in out.glob(".*.lease"):
        with suppress(OSError, ValueError):
            if list((out / lease.name[1:-6]).glob("metrics.jsonl")):
                found.append(int(json.loads(lease.read_text())["pid"]))
    return sorted(found)


def _states(out: Path) -> list[str]:
    return [run["state"] for run in json.loads((out / "runs.json").read_text("utf-8"))["runs"]]


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing happened within {SECONDS:g} s")
        time.sleep(0.02)


WAYS = {
    "readers of one disk cache: the same numbers, the limit holds": (killed_readers, 1),
    "students of a sweep: reported, the other one finishes, a rerun trains it": (killed_members, 5),
}
"""What is killed, and how many kills of `--kills` make one here."""


def trial(kills: int, seed: int) -> tuple[list[list[object]], list[str]]:
    """Return the rows of HEAD, and the errors."""
    rows, wrong = list[list[object]](), list[str]()
    for name, (check, share) in WAYS.items():
        count, started = max(1, kills // share), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = [problem for problem in check(Path(folder), count, seed) if problem]
        seconds = time.perf_counter() - started
        rows.append([name, count, count - len(found), len(found), f"{seconds:.0f}"])
        wrong += [f"{name}: {problem}" for problem in found]
        click.echo(f"{name}: {count} kills, {len(found)} failures", err=True)
    return rows, wrong
