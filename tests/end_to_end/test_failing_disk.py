"""A full, read-only or missing disk gives one line without traceback, and the next start
continues."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from harness.processes import finish, fork, in_small_parts
from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from tests.downstream.support import classified
from tests.end_to_end.disks import CANNOT, on_full_disk, on_read_only_disk, with_small_files
from tests.end_to_end.support import ROOT, STUDENT
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers

EXT = ("zarr", "h5")
# Each runs a dump or a training in a process, and a second process that continues.
APART = pytest.mark.apart
DUMP, TRAIN = "teachonce.teacher_dump.cli", "teachonce.student_train.cli"
STORE = "teachonce.feature_store.cli"
FEW = ("--batch-tokens", 256, "--logits", "topk:8", "--attention", "none", "--device", "cpu")
STEPS = 12
SETTINGS = (
    *(
        "--vocab", 500, *STUDENT, "--student", "bert:32x2x4", "--loss", "mlm=1,hidden=1",
        "--held-out", 0.1,
    ),
    *("--steps", STEPS, "--checkpoint-every", 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def words(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers
) -> tuple[str | Path | int, ...]:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 20)
    return ("--model", tiny_teacher("bert"), "--corpus", corpus, *FEW, "--out")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    folder = tmp_path_factory.mktemp("store")
    corpus = write_corpus(folder / "corpus.txt", 60)
    return dumped(tiny_teacher("bert"), corpus, folder / "store.h5", attention="none")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def the_error(log: Path) -> str:
    """Return the single line of the last failed command, and clear the output."""
    text = log.read_text()
    log.write_text("")
    for word in ("Traceback", "Exception ignored", "Segmentation"):
        assert word not in text, text
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, text
    return errors[0]


def ended(process: ForkServerProcess) -> int:
    """Return the exit code of a process that mounts its own disk, if this machine allows mounts."""
    if (code := finish(process)) == CANNOT:
        pytest.skip("no mounts allowed on this machine")
    return code


def sound(store: Path) -> int:
    """Verify a finished store and return its number of parts."""
    report = verify(store)
    assert report.problems == []
    beside = {path.name for path in store.parent.iterdir()}
    assert not [name for name in beside if name.startswith(f".{store.name}")], beside
    return report.parts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, words: Any) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    for ext in EXT:
        process = fork(in_small_parts, DUMP, *words, folder / f"a.{ext}", log=folder / "log")
        assert finish(process) == 0
    return lambda ext: folder / f"a.{ext}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ext", "started"),
    [*(pytest.param(ext, False, marks=APART) for ext in ("zarr", "h5")), ("h5", True)],
)
def test_files_that_cannot_grow(
    tmp_path: Path, words: Any, log: Path, ext: str, undisturbed: Any, started: bool
) -> None:
    """The disk is too small for a store's first files or for the finished file."""
    out = tmp_path / f"store.{ext}"
    limit = undisturbed("h5").stat().st_size - 999 if started else 20_000
    assert finish(fork(with_small_files, limit, DUMP, *words, out, log=log)) == 1
    line = the_error(log)
    assert f"cannot write {out}: File too large; free some space and run the same" in line
    assert out.exists() == ("published parts are not lost" in line) == started
    assert finish(fork(in_small_parts, DUMP, *words, out, log=log)) == 0
    assert sound(out) > 2


def blocks(store: Path) -> int:
    """Return the bytes of a store on a disk with blocks of 4096 bytes."""
    files = [store, *store.rglob("*")] if store.is_dir() else [store]
    return sum(4096 * -(-file.stat().st_size // 4096) for file in files if file.is_file())


@pytest.mark.parametrize(
    ("ext", "share"),
    [
        ("zarr", 0.3),
        ("h5", 0.0),
        ("h5", 0.95),
        *(pytest.param(*case, marks=APART) for case in (("zarr", 0.9), ("h5", 0.3), ("h5", 0.6))),
    ],
)
def test_full_disk(
    tmp_path: Path, words: Any, log: Path, undisturbed: Any, ext: str, share: float
) -> None:
    """The disk is full from the start, at the creation of the store, in a part, or at the seal, for
    which HDF5 needs twice the space."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    out, whole = disk / f"store.{ext}", blocks(undisturbed(ext)) * (2 if ext == "h5" else 1)
    ended(fork(on_full_disk, disk, int(share * whole), copy, DUMP, *words, out, log=log))
    text = log.read_text()
    assert "first: 1\n" in text and "second: 0\n" in text, text
    assert "No space left on device; free some space and run the same" in the_error(log)
    assert sound(copy / out.name) > 2


@pytest.mark.parametrize("ext", EXT)
def test_read_only_folder(tmp_path: Path, words: Any, log: Path, ext: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    out = folder / f"store.{ext}"
    assert ended(fork(on_read_only_disk, folder, DUMP, *words, out, log=log)) == 1
    assert f"folder {folder} cannot be written to; make it writable" in the_error(log)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("gone", "ext"),
    [
        ("store", "zarr"),
        ("folder", "h5"),
        pytest.param("store", "h5", marks=APART),
        pytest.param("folder", "zarr", marks=APART),
    ],
)
def test_folder_removed(tmp_path: Path, words: Any, log: Path, ext: str, gone: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    out = folder / f"store.{ext}"
    parts = out / "parts" if ext == "zarr" else Path(f"{out}.parts")
    process = fork(in_small_parts, DUMP, *words, out, log=log)
    while not parts.exists() or not any(path.stem.isdecimal() for path in parts.iterdir()):
        assert process.is_alive()
        time.sleep(0.002)
    for lost in {"store": [out, Path(f"{out}.parts")], "folder": [folder]}[gone]:
        if lost.exists():
            lost.rename(tmp_path / f"moved-{lost.name}")
    assert finish(process) == 1
    line = the_error(log)
    assert str(out) in line and "run the same command again" in line
    assert "not lost" not in line
    folder.mkdir(exist_ok=True)
    assert finish(fork(in_small_parts, DUMP, *words, out, log=log)) == 0
    assert sound(out) > 2 and len(open_store(out)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("limit", [pytest.param(1_000, marks=APART), 300_000])
def test_training_files_that_cannot_grow(
    tmp_path: Path, store: Path, log: Path, limit: int
) -> None:
    out = tmp_path / "student"
    train = (TRAIN, "--store", store, "--out", out, *SETTINGS)
    assert finish(fork(with_small_files, limit, *train, log=log)) == 1
    line = the_error(log)
    form = rf"{out}: .*cannot be (prepared|written): File too large; free some space"
    assert re.search(form, line)
    more = ["--resume"] if (out / "training.json").exists() else []
    assert finish(fork(in_small_parts, *train, *more, log=log)) == 0
    assert (out / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=APART), 0.5, pytest.param(0.97, marks=APART)]
)
def test_training_on_a_full_disk(tmp_path: Path, store: Path, log: Path, share: float) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    out, free = disk / "student", int(share * 1_600_000)
    train = (TRAIN, "--store", store, "--out", out, *SETTINGS)
    process = fork(_train_on_full_disk, disk, free, copy, *train, log=log)
    code, text = ended(process), log.read_text()
    assert code == 0 and "first: 1\n" in text and "second: 0\n" in text, text
    assert "No space left on device; free some space and continue with --resume" in the_error(log)
    assert (copy / "student" / "model.safetensors").exists()


def _train_on_full_disk(disk: Path, free: int, copy: Path, *words: Any) -> None:
    on_full_disk(disk, free, copy, *words, more="--resume")


def test_a_fine_tuned_model_on_a_full_disk(
    tmp_path: Path, tiny_teacher: Teachers, log: Path
) -> None:
    disk, copy, file = tmp_path / "disk", tmp_path / "copy", tmp_path / "texts.tsv"
    disk.mkdir()
    classified(file, 12, 0)
    words: tuple[Any, ...] = (
        "--task",
        "classify",
        "--model",
        tiny_teacher("bert"),
        "--train",
        file,
        "--dev",
        file,
    )
    words += ("--steps", 1, "--seeds", 1, "--save", "--out", disk / "out")
    tune = "teachonce.downstream.cli"
    process = fork(on_full_disk, disk, 40_000, copy, tune, *words, log=log)
    code, text = ended(process), log.read_text()
    assert code == 0 and "first: 1\n" in text and "second: 0\n" in text, text
    assert "check the free space" in the_error(log)
    assert sorted(path.name for path in copy.iterdir()) == ["out"]
    assert sorted(path.name for path in (copy / "out").iterdir()) == ["model", "scores.json"]


def test_training_in_a_read_only_folder(tmp_path: Path, store: Path, log: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    train = (TRAIN, "--store", store, "--out", folder / "student", *SETTINGS)
    code = ended(fork(on_read_only_disk, folder, *train, log=log))
    # There is nothing to resume.
    assert code == 1 and "and run the same command again, or give another" in the_error(log)
    assert list(folder.iterdir()) == []


def test_training_whose_folder_is_removed(tmp_path: Path, store: Path, log: Path) -> None:
    out = tmp_path / "student"
    train = (TRAIN, "--store", store, "--out", out, *SETTINGS, "--steps", 400)
    process = fork(in_small_parts, *train, log=log)
    while not (out / "metrics.jsonl").exists():
        assert process.is_alive()
        time.sleep(0.002)
    out.rename(tmp_path / "moved")
    assert finish(process) == 1
    assert f"{out}: cannot be written: No such file" in the_error(log)
    assert not out.exists()
    assert finish(fork(in_small_parts, *train, "--steps", 3, log=log)) == 0


ALONE = """
import sys
from pathlib import Path
from tests.end_to_end.disks import on_own_disk
on_own_disk(Path(sys.argv[1]), int(sys.argv[2]))
from harness.processes import in_small_parts
in_small_parts(*sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("work", "free"),
    [
        ("convert", 200_000),
        pytest.param("dump", 300_000, marks=APART),
        pytest.param("dump", 20_000, marks=APART),
        pytest.param("convert", 0, marks=APART),
        pytest.param("merge", 200_000, marks=APART),
    ],
)
def test_a_process_of_its_own_ends_with_1_on_a_full_disk(
    tmp_path: Path, tiny_teacher: Teachers, words: Any, store: Path, work: str, free: int
) -> None:
    """A process ends with 1 on a full disk: HDF5 closes open files at the end of a process, after
    Python has finished. This crashed once, and never in a forked process."""
    disk = tmp_path / "disk"
    disk.mkdir()
    other = tmp_path / "other.h5"
    if work == "merge":
        corpus = write_corpus(tmp_path / "other.txt", 50)
        dumped(tiny_teacher("bert"), corpus, other, attention="none")
    command: dict[str, tuple[Any, ...]] = {
        "dump": (DUMP, *words, disk / "a.h5"),
        "convert": (STORE, "convert", store, disk / "a.h5"),
        "merge": (STORE, "merge", "--recode", store, other, disk / "a.h5"),
    }
    call = [sys.executable, "-c", ALONE, disk, free, *command[work]]
    done = subprocess.run([*map(str, call)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == CANNOT:
        pytest.skip("no mounts allowed on this machine")
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "No space left on device; free some space and run the same" in done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
