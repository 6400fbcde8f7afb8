"""Commands in difficult environments: a full disk, no inodes, another user's files, a narrow umask,
kills. Each ends with exit code 0 or one line; repeated in a normal environment, its output is
normal."""

import ctypes
import os
import random
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from harness.processes import command, finish, fork
from teachonce.store.tools.verify import verify
from tests.end_to_end.disks import CANNOT, exit_code, on_own_disk
from tests.end_to_end.support import STUDENT
from tests.integrity.support import content_of, save_teacher
from tests.making.dumps import write_corpus

DUMP, STORE = "teachonce.teacher_dump.cli", "teachonce.feature_store.cli"
TRAIN, SWEEP = "teachonce.student_train.cli", "teachonce.student_train.sweep.cli"
DOWNSTREAM = "teachonce.downstream.cli"
NOBODY = 65534
# different from the names of endings
PLACES = ("full disk", "no inodes", "another user", "random kill")
ENDINGS = ("worked", "one-line error", "killed")  # for the first run
HEAD = ("command", *PLACES, *ENDINGS, "failures")
Words = tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command line, with GIVEN and MADE for the folders of inputs and outputs; its output, and
    the arguments to add when it is repeated."""

    module: str
    line: str
    out: str
    again: Words = ()
    bytes: int = 1 << 20  # for its output, approximately
    inodes: int = 200
    seconds: float = 6.0

    def words(self, given: Path, made: Path) -> Words:
        folders = {"GIVEN": str(given), "MADE": str(made)}
        return tuple(re.sub("GIVEN|MADE", lambda m: folders[m[0]], w) for w in self.line.split())


TEACH = "--model GIVEN/teacher --corpus GIVEN/corpus.txt --logits topk:4 --device cpu --out MADE/"
LEARN = f"--store GIVEN/a.zarr --vocab 300 {' '.join(STUDENT)} --loss mlm=1"
MIXED = "mixed-vocab --model GIVEN/teacher --corpus GIVEN/corpus.txt --vocab 400 --width 16"
MLM = "--task mlm --model GIVEN/teacher --train GIVEN/corpus.txt --steps 30 --out MADE/mlm"
COMMANDS = {
    "teacher-dump, zarr": Command(DUMP, f"{TEACH}new.zarr", "new.zarr"),
    "teacher-dump, h5": Command(DUMP, f"{TEACH}new.h5", "new.h5"),
    "convert": Command(STORE, "convert GIVEN/a.zarr MADE/new.h5", "new.h5"),
    "merge": Command(STORE, "merge --recode GIVEN/a.zarr GIVEN/b.zarr MADE/new.zarr", "new.zarr"),
    "forget": Command(STORE, "forget MADE/a.zarr --documents GIVEN/list", "a.zarr"),
    "page": Command(STORE, "page GIVEN/a.zarr --out MADE/page.html", "page.html"),
    "export": Command(STORE, "export GIVEN/a.zarr MADE/rows --to datasets", "rows"),
    "student-train": Command(
        *(TRAIN, f"{LEARN} --steps 40 --checkpoint-every 5 --out MADE/student", "student"),
        again=("--resume",),
    ),
    "student-sweep": Command(
        SWEEP, f"{LEARN} --steps 30 --loss hidden=1 --jobs 2 --out MADE/sweep", "sweep"
    ),
    "mixed-vocab": Command(
        DUMP, f"{MIXED} --steps 20 --device cpu --out MADE/mixed.zarr", "mixed.zarr"
    ),
    "downstream mlm": Command(DOWNSTREAM, MLM, "mlm", ("--resume",)),
}


def given_in(folder: Path) -> Path:
    """Make the inputs of the commands: a teacher, texts, two stores, a list of documents."""
    given = folder / "given"
    given.mkdir()
    save_teacher(given / "teacher")
    write_corpus(given / "corpus.txt", 60)
    (given / "list").write_text("3\n")
    for name in ("a.zarr", "b.zarr"):
        words = COMMANDS["teacher-dump, zarr"].words(given, given)
        limit = "5000" if name == "a.zarr" else "300"  # `merge` refuses two equal stores
        said = typed(
            *(DUMP, (*words[:-1], str(given / name), "--limit", limit)),
            *(folder / "log", plainly),
        )
        if not said.endswith("exit code 0"):
            raise RuntimeError(said)
    return given


@dataclass(frozen=True)
class Case:
    """A command in an environment; `amount` is the free space, or the seconds until a kill."""

    name: str
    place: str
    amount: float

    @property
    def command(self) -> Command:
        return COMMANDS[self.name]

    def prepare(self, given: Path, made: Path) -> None:
        """Copy the inputs that the command changes."""
        if self.name == "forget":
            shutil.copytree(given / "a.zarr", made / "a.zarr")

    def words(self, given: Path, made: Path, again: bool = False) -> Words:
        started = (made / self.command.out).exists()
        return self.command.words(given, made) + (self.command.again if again and started else ())


def typed(module: str, words: Words, log: Path, place: Callable[..., None], *how: object) -> str:
    """Run a command in its own process; return its output, which ends with the exit code."""
    code = finish(fork(place, *how, module, words, log=log))
    return f"{log.read_text('utf-8', 'replace')}\nexit code {code}"


def plainly(module: str, words: Words) -> None:
    command(module, *words)


def as_another_user(module: str, words: Words) -> None:
    """Run a command as a user who owns neither inputs nor output folder: as root without
    privileges, since another user may not read this Python."""
    os.umask(0o077)
    os.environ |= {"HOME": "/nonexistent", "TEACHONCE_CACHE": "", "XDG_CACHE_HOME": ""}
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
    command(module, *words)


def given_away(folder: Path, mode: int) -> None:
    """Change the owner and the mode of a folder."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    folder.chmod(mode)


def on_small_disk(
    disk: Path, place: str, free: int, given: Path, copy: Path, case: Case, log: Path
) -> None:
    """Run the command on a disk with little free space; then free space, and run it again."""
    on_own_disk(disk, 1 << 27, 4000)
    case.prepare(given, disk)
    (disk / "ballast").mkdir()
    room = os.statvfs(disk)
    if place == "full disk":
        (disk / "ballast" / "0").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - free)))
    else:
        for number in range(max(0, room.f_favail - free)):
            (disk / "ballast" / str(number)).touch()
    module = case.command.module
    first = exit_code(command, module, *case.words(given, disk))
    print(f"first: {first}", flush=True)
    shutil.rmtree(disk / "ballast")
    second = first and exit_code(command, module, *case.words(given, disk, again=True))
    print(f"second: {second}", flush=True)
    shutil.copytree(disk, copy, symlinks=True)


def problem_of(said: str, code: int) -> str:
    """Return the error in a command's ending; "" if it worked, or failed with one line."""
    if "Traceback (most recent" in said or "Exception ignored" in said:
        return "a traceback"
    errors = [line for line in said.splitlines() if line.startswith("Error: ")]
    if code not in (0, 1) or (code == 1) != (len(errors) == 1):
        return f"exit code {code} and {len(errors)} lines of errors"
    return ""


def tried(folder: Path, given: Path, case: Case) -> tuple[str, str]:
    """Try a case; return the ending of the first command, and the error or ""."""
    made, log = folder / "made", folder / "log"
    module = case.command.module
    made.mkdir()
    folder.chmod(0o755)
    if case.place in ("full disk", "no inodes"):
        how = (made, case.place, int(case.amount), given, folder / "copy", case, log)
        if (code := finish(fork(on_small_disk, *how, log=log), 600)) == CANNOT:
            return "no mounts allowed", ""
        said = log.read_text("utf-8", "replace")
        first, _, second = said.partition("first: ")
        codes = re.findall(r"^(?:first: |second: )(\d+)", said, re.M)
        if code or len(codes) != 2:
            return "", f"exit code {code}: {said[-300:]}"
        problem = problem_of(first, int(codes[0])) or problem_of(second, int(codes[1]))
        if int(codes[1]):
            problem = problem or f"typed again: {second[-300:]}"
        made = folder / "copy"
        ending = "one-line error" if int(codes[0]) else "worked"
    elif case.place == "random kill":
        case.prepare(given, made)
        process = fork(plainly, module, case.words(given, made), log=log)
        process.join(case.amount)
        worked = not process.is_alive()
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        ending = "worked" if worked else "killed"
        said = f"exit code {process.exitcode}"
        if not worked:
            said = typed(module, case.words(given, made, again=True), log, plainly)
        code = int(said.rpartition(" ")[2])
        problem = problem_of(said, code) or ("" if code == 0 else f"typed again: {said[-300:]}")
    else:
        case.prepare(given, made)
        shutil.copytree(given, folder / "theirs")
        given_away(made, 0o777 if case.amount > 0.4 else 0o755)
        given_away(folder / "theirs", 0o700 if case.amount > 0.9 else 0o755)
        said = typed(module, case.words(folder / "theirs", made), log, as_another_user)
        code = int(said.rpartition(" ")[2])
        problem, ending = problem_of(said, code), "one-line error" if code else "worked"
        if code:
            return ending, problem
    return ending, problem or wrong_with(case, given, made)


def wrong_with(case: Case, given: Path, made: Path) -> str:
    """Return the error in the output of a command that worked, or ""."""
    out = made / case.command.out
    if not out.exists():
        return "no output"
    left = [each.name for each in made.rglob("*") if ".tmp" in each.name or ".new-" in each.name]
    if left:
        return f"left: {', '.join(left[:3])}"
    if out.suffix in (".zarr", ".h5"):
        if problems := verify(out).problems:
            return f"damaged: {problems[0]}"
        if content_of(out) != content_of(reference(case, given)):
            return "another store"
    elif case.name in ("student-train", "downstream mlm"):
        name = "model.safetensors"
        if weights_in(out) != weights_in(reference(case, given)):
            return f"another {name}"
    return ""


def weights_in(out: Path) -> list[bytes]:
    return [each.read_bytes() for each in sorted(out.rglob("model.safetensors"))]


def reference(case: Case, given: Path) -> Path:
    """Return the command's output in a normal environment, made once."""
    made = given.parent / "reference" / case.name
    if not (made / case.command.out).exists():
        made.mkdir(parents=True)
        case.prepare(given, made)
        said = typed(case.command.module, case.words(given, made), made.parent / "log", plainly)
        if not said.endswith("exit code 0"):
            raise RuntimeError(f"{case.name}: {said}")
    return made / case.command.out


def cases(chance: random.Random, number: int, names: tuple[str, ...]) -> Iterator[Case]:
    """Draw some cases of each command and place."""
    for name in names:
        for place in PLACES:
            for _ in range(number):
                yield Case(name, place, _amount(chance, name, place))


def _amount(chance: random.Random, name: str, place: str) -> float:
    if place == "full disk":
        return chance.random() ** 2 * COMMANDS[name].bytes
    if place == "no inodes":
        return chance.randrange(COMMANDS[name].inodes)
    return chance.random() * (1 if place == "another user" else COMMANDS[name].seconds)


def trial(times: int, seed: int = 0) -> tuple[list[list[str]], list[str]]:
    """Try every command in every environment; return the rows of HEAD, and the errors."""
    chance, wrong = random.Random(seed), list[str]()
    counts = {name: Counter[str]() for name in COMMANDS}
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        given = given_in(Path(scratch))
        for case in cases(chance, times, tuple(COMMANDS)):
            folder = Path(tempfile.mkdtemp(dir=scratch))
            ending, problem = tried(folder, given, case)
            counts[case.name].update((case.place, ending))
            if problem:
                counts[case.name]["failures"] += 1
                wrong.append(f"{case}: {problem}")
                click.echo(wrong[-1], err=True)
            shutil.rmtree(folder)
    columns = (*PLACES, *ENDINGS, "failures")
    return [[name, *(str(found[key]) for key in columns)] for name, found in counts.items()], wrong
