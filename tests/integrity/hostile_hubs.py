"""Commands and a hub that misbehaves: each kind of request gets each twist of `tests.twisted_hub`.
A command ends with exit code 0 or with one line of error, within SECONDS and its limits of memory
and of files, and writes nothing outside of its folders."""

import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.hub_server import serving
from tests.integrity.damage import small_store
from tests.integrity.support import save_teacher
from tests.making.dumps import write_corpus
from tests.twisted_hub import ANSWERS

HEAD = ("command", "twisted requests", "worked", "one-line error", "failures")
SECONDS = 300.0  # for a command, in which a hub may be slow several times
MEMORY, FILE = 2**33, 2**30  # limits in bytes: address space, of which torch takes 4 GB; a file
PATIENCE = 4.0  # seconds, instead of a minute: the limit for an answer that arrives in drops
RUN = (
    "import sys; from importlib import import_module; from teachonce.support import hub_client;"
    f" hub_client.ANSWER_SECONDS = {PATIENCE}; import_module(sys.argv.pop(1)).main()"
)
DUMP, STORE = "teachonce.teacher_dump.cli", "teachonce.feature_store.cli"
SMALL = ("--logits", "topk:4", "--device", "cpu", "--out", "out.zarr")
COMMANDS: dict[str, tuple[str, ...]] = {
    "--model": (DUMP, "--model", "user/model", "--corpus", "GIVEN/corpus.txt", *SMALL),
    "--corpus hf:": (DUMP, "--model", "GIVEN/model", "--corpus", "hf:user/corpus", *SMALL),
    "hf://": (STORE, "info", "hf://datasets/user/stores/a.zarr"),
    "push": (STORE, "push", "GIVEN/stores/a.zarr", "user/pushed"),
}
BEGINS = {
    "--model": ("HEAD /user/model", "GET /user/model", "GET /content", "GET /api/models"),
    "--corpus hf:": ("GET /api/datasets", "GET /datasets", "POST /api/datasets"),
    "hf://": ("GET /api/datasets", "GET /datasets", "POST /api/datasets"),
    "push": ("POST /api/repos", "GET /api/datasets", "POST /api/datasets", "POST /datasets",
             "PUT /content", "POST /api/validate"),
}  # fmt: skip
"""The requests that each command sends, by their begin."""
CASES = [(name, begin, twist) for name in COMMANDS for begin in BEGINS[name] for twist in ANSWERS]


def given_in(folder: Path) -> None:
    """Make a teacher, a text, a data set and a store."""
    save_teacher(folder / "model")
    for name in ("corpus", "stores"):
        (folder / name).mkdir()
    write_corpus(folder / "corpus.txt", 20)
    write_corpus(folder / "corpus" / "train.txt", 20)
    small_store(folder / "stores" / "a.zarr", views=1, hidden=("mean",), attention=())


def ended(given: Path, name: str, begin: str, twist: str) -> tuple[str, str]:
    """Run a command while requests with this beginning get a twist; return the ending ("" without
    such a request), and the error or ""."""
    with tempfile.TemporaryDirectory() as made, serving() as hub:
        home = Path(made, "a", "b", "c", "d", "e", "home")
        home.mkdir(parents=True)
        for path in ("models/user/model", "datasets/user/corpus", "datasets/user/stores"):
            hub.add(path, given / path.rpartition("/")[2])
        hub.twists = {begin: ANSWERS[twist]}
        online = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
        words = [word.replace("GIVEN", str(given)) for word in COMMANDS[name]]
        try:
            done = subprocess.run(
                [sys.executable, "-c", RUN, *words],
                cwd=home, env=online | hub.environment(home), timeout=SECONDS, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "failures", f"over {SECONDS:g} s"
        if not any(each.startswith(begin) for each in hub.requests):
            return "", ""
        outside = [path.name for path in Path(made).rglob("*") if "outside" in path.name]
        return _judged(done.stdout, done.returncode, outside)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))


def _judged(said: str, code: int, outside: list[str]) -> tuple[str, str]:
    errors = said.count("Error: ")  # a progress bar may precede it
    if outside:
        return "failures", f"wrote {outside[0]} outside"
    if "Traceback" in said or "File too large" in said or code not in (0, 1):
        return "failures", f"exit code {code}: {said[-300:]}"
    if code and not errors:
        return "failures", f"no line of error: {said[-300:]}"
    return ("one-line error" if code else "worked"), ""


def hostile(given: Path, count: int, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Try `count` cases, or all if fewer; yield each with its ending and the error."""
    cases = random.Random(seed).sample(CASES, min(count, len(CASES)))
    for name, begin, twist in cases:
        ending, problem = ended(given, name, begin, twist)
        if ending:
            yield name, f"{begin}, {twist}", ending, problem


def trial(hubs: int, seed: int) -> tuple[list[list[object]], list[str]]:
    """Return the rows of HEAD, and the errors."""
    found, wrong = Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        given_in(Path(folder))
        for name, case, ending, problem in hostile(Path(folder), hubs, seed):
            found[name, ending] += 1
            if problem:
                wrong.append(f"{name}, {case}: {problem}")
    rows: list[list[object]] = [
        [name, sum(found[name, end] for end in HEAD[2:]), *(found[name, end] for end in HEAD[2:])]
        for name in COMMANDS
    ]
    return rows, wrong
