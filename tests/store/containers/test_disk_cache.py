"""The disk cache retains recent entries within its limit; kills and damage lose no data."""

import errno
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from teachonce.store import UserError, open_store
from teachonce.store.containers import network
from teachonce.store.containers.cache_option import parse_disk_cache
from teachonce.store.containers.disk_cache import (
    END,
    ENTRY,
    TOTAL,
    UNIT,
    DiskCache,
    FetchedBytes,
    taken_by,
)
from teachonce.support import files
from teachonce.support.arrays import Array
from tests.making.stores import begin, features_of, make_part, put_part
from tests.rough_network import BUCKET, S3, Weather
from tests.store.containers.caching import LARGEST, STORE, get, piece_of, put
from tests.store.containers.far_stores import assert_same, streamed

URL = f"s3://{BUCKET}/a.zarr"
ROOT = Path(__file__).parents[3]


def sizes(folder: Path) -> list[int]:
    """Return the bytes on disk of each file of the cache."""
    return [
        taken_by((folder / name).stat().st_size)
        for name in os.listdir(folder)
        if ENTRY.fullmatch(name) or name.startswith(files.UNFINISHED)
    ]


def counted(folder: Path) -> int:
    number: int = TOTAL.unpack((folder / "lock").read_bytes())[0]
    return number


def test_what_was_used_longest_ago_goes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = {
        str(n): FetchedBytes(np.full(UNIT - END.size, n, np.uint8), 9, set()) for n in range(8)
    }
    cache = DiskCache(tmp_path, 5 * UNIT)
    (tmp_path / "notes.txt").write_text("mine")
    for name in "01234":
        cache.put("s", name, 0, 1, pieces[name])
    assert (kept := cache.get("s", "0", 0, 1)) and kept.whole == 9 and not kept.data.any()
    other = DiskCache(tmp_path, 5 * UNIT)  # from another process
    other.put("s", "5", 0, 1, pieces["5"])
    there = [name for name in "012345" if cache.get("s", name, 0, 1)]
    assert there == ["0", "3", "4", "5"]  # a tenth more space than needed was freed
    assert cache.get("another store", "0", 0, 1) is None
    assert cache.get("s", "0", 0, 2) is None
    DiskCache(tmp_path, 2 * UNIT)  # an instance with a smaller limit enforces it
    assert sum(sizes(tmp_path)) == counted(tmp_path) == 2 * UNIT
    for name in "67":
        other.put("s", name, 0, 1, FetchedBytes(np.zeros(9 * UNIT, np.uint8), 1, set()))
    assert len(sizes(tmp_path)) == 2
    (line,) = caplog.messages
    assert line.startswith(f"--cache disk:{tmp_path},{5 * UNIT}: {10 * UNIT} bytes of 6 are not")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_damaged_entries_are_no_entries(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2**20)

    def entry() -> Path:
        put(cache, 3)
        (found,) = (path for path in tmp_path.iterdir() if ENTRY.fullmatch(path.name))
        return found

    data = entry().read_bytes()
    for torn in (b"", data[:5], data[:-1], data[1:], bytes(len(data))):
        entry().write_bytes(torn)
        assert get(cache, 3) is None and counted(tmp_path) >= 0
    assert (found := get(DiskCache(tmp_path, 2**20), 3)) is None
    put(cache, 3)
    assert (found := get(cache, 3)) and (found.data == piece_of(3).data).all()
    (tmp_path / "lock").write_bytes(b"?")
    put(cache, 4)
    assert counted(tmp_path) == sum(sizes(tmp_path)) > 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock, so that no file is replaced during a sum: its size would be counted twice."""
    with open(folder / "lock", "rb") as lock:
        files.lock(lock.fileno(), wait=True)
        yield


@contextmanager
def writers(folder: Path, bound: int, seeds: range) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as opened:
        module, started = "tests.store.containers.caching", []
        for seed in seeds:
            command = [sys.executable, "-m", module, str(folder), str(bound), str(seed)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            started.append(opened.enter_context(process))
            opened.callback(process.kill)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started


@pytest.mark.slow
def test_writers_together_keep_the_bound_though_they_are_killed(tmp_path: Path) -> None:
    bound, chance, most = 10 * LARGEST, random.Random(1), 0
    for round_ in range(3):
        with writers(tmp_path, bound, range(2 * round_, 2 * round_ + 2)) as processes:
            for process in processes:
                end = time.monotonic() + chance.uniform(0.2, 0.5)
                while time.monotonic() < end:
                    with locked(tmp_path):
                        most = max(most, sum(sizes(tmp_path)))
                    time.sleep(0.001)  # a lock has no queue: let the writers acquire it
                process.send_signal(signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL
        cache = DiskCache(tmp_path, bound)
        assert not any(name.startswith(files.UNFINISHED) for name in os.listdir(tmp_path))
        assert sum(sizes(tmp_path)) == counted(tmp_path)
    assert bound / 2 < most <= bound
    found = {name: piece for name in range(40) if (piece := get(cache, name))}
    assert len(found) == len(sizes(tmp_path)) > 3  # every file is one of them, and complete
    for name, piece in found.items():
        assert piece.whole == piece_of(name).whole and (piece.data == piece_of(name).data).all()


def killing(real: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return a function that works for N calls, and kills this process at the next."""
    left = iter(range(calls))

    def work(*words: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words)

    return work


def test_one_that_is_killed_as_it_writes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 2**24)
    put(cache, 1)
    before = counted(tmp_path)
    # Before its space is counted, with its space reserved, with an empty file, and when complete.
    for step, calls in (("pwrite", 1), ("open", 2), ("fdopen", 1), ("rename", 1)):
        if not (child := os.fork()):
            monkeypatch.setattr(os, step, killing(getattr(os, step), calls - 1))
            put(cache, 2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert sum(sizes(tmp_path)) <= counted(tmp_path)
        again = DiskCache(tmp_path, 2**24)
        assert counted(tmp_path) == before == sum(sizes(tmp_path))
        assert get(again, 1) and get(again, 2) is None


def test_a_full_disk_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, 2**24)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = FetchedBytes(np.zeros(1000, np.uint8), 1, set())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT, limit[1]))
        cache.put("s", "small", 0, 1, small)
        for number in range(3):
            cache.put("s", str(number), 0, 1, FetchedBytes(np.zeros(2**16, np.uint8), 1, set()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (line,) = caplog.messages
    assert "nothing more is cached there: File too large; free some space" in line
    assert cache.get("s", "small", 0, 1) and sum(sizes(tmp_path)) == counted(tmp_path) == UNIT


def test_only_present_entries_are_announced_where_nothing_reads_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without read-ahead (as on macOS), `announced` is true only for present entries."""
    cache = DiskCache(tmp_path, 2**20)
    put(cache, 1)
    monkeypatch.delattr(os, "posix_fadvise")
    for name, present in ((1, True), (2, False)):
        size = len(piece_of(name).data)
        assert cache.announced(STORE, str(name), 0, size) == present


WORDS = {
    "disk:/a/b,100GB": ("/a/b", 10**11), "disk:/a,b,1.5k": ("/a,b", 1500),
    "disk:c,2MiB": ("c", 2**21), "disk:c,500M": ("c", 5 * 10**8), "disk:c,77": ("c", 77),
}  # fmt: skip


def test_the_word_of_a_cache(tmp_path: Path) -> None:
    for word, (folder, bound) in WORDS.items():
        assert parse_disk_cache(word) == (Path(folder), bound)
    wrong = ("disk:", "disk:/a", "disk:,1GB", "disk:/a,", "disk:/a,GB", "disk:/a,0", "ram")
    for word in (*wrong, f"disk:/a,{400 * '9'}"):
        with pytest.raises(UserError, match=f"--cache {word}: .*expected .*100GB") as caught:
            parse_disk_cache(word)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--cache 100GB: expected disk:DIR,SIZE"):
        open_store(tmp_path / "near.zarr", cache="100GB")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--cache disk:.*/file: cannot be written: .*"):
        DiskCache(tmp_path / "file", 1)


def test_a_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UserError, match="--cache disk:.*: cannot be written: .* has no locks"):
        DiskCache(tmp_path, UNIT)
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two stores with different values and equal shapes."""
    folder, features = tmp_path_factory.mktemp("cached"), features_of("default", None, 1)
    for name, seed in (("a.zarr", 0), ("b.zarr", 7)):
        writer = begin(folder / name, features)
        for number in range(2):
            put_part(writer, number, make_part(features, seed + number))
        writer.seal()
    return folder / "a.zarr", folder / "b.zarr"


@pytest.fixture
def s3(server: S3, stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> S3:
    monkeypatch.setattr(network, "FIRST_PAUSE", 0.01)
    server.weather = Weather()
    server.put(stores[0], "a.zarr")
    return server


def asked_for(s3: S3, work: Callable[[], object]) -> set[str]:
    """Return the names that some work requests from the server."""
    names: set[str] = set()

    def note(method: str, path: str) -> bool:
        names.add(path.partition("?")[0].partition("a.zarr/")[2])
        return False

    s3.weather = Weather({"503": 1.0}, note)
    work()
    s3.weather = Weather()
    return names


@pytest.mark.slow
def test_a_store_is_fetched_once(s3: S3, stores: tuple[Path, Path], tmp_path: Path) -> None:
    word = f"disk:{tmp_path / 'cache'},1GB"
    near = streamed(open_store(stores[0]))

    def read() -> list[Array]:
        with pickle.loads(pickle.dumps(open_store(URL, cache=word))) as fs:
            return streamed(fs)

    s3.weather = Weather({"503": 0.1, "torn": 0.1, "flipped": 0.05})
    assert_same(read(), near)
    s3.weather = Weather()
    # a reader that drops a flipped entry may drop an entry that another thread fetched
    assert_same(read(), near)
    found = list[list[Array]]()
    again = asked_for(s3, lambda: found.append(read()))
    assert again == {"zarr.json", "manifest/zarr.json", "manifest/c/0"}
    assert_same(found[0], near)

    entries = [each for each in (tmp_path / "cache").iterdir() if ENTRY.fullmatch(each.name)]
    for each in entries[::2]:  # torn by a failing disk
        each.write_bytes(each.read_bytes()[:-7])
    for each in entries[1::2]:  # and some that only the store's own checksums detect
        data = bytearray(each.read_bytes())
        data[(len(data) - END.size) // 2] ^= 1
        end = END.unpack(data[-END.size :])
        checksum = google_crc32c.value(bytes(data[: -END.size]))
        each.write_bytes(bytes(data[: -END.size]) + END.pack(end[0], checksum, end[2]))
    assert_same(read(), near)
    assert asked_for(s3, read) == again

    s3.put(stores[1], "a.zarr")  # another store at the same address
    assert_same(read(), streamed(open_store(stores[1])))
    s3.put(stores[0], "a.zarr")
    assert asked_for(s3, read) == again


def test_a_small_cache_and_a_full_one_read_the_same(
    s3: S3, stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    near = streamed(open_store(stores[0]))
    for size in ("1", "20k"):
        with open_store(URL, cache=f"disk:{tmp_path / size},{size}") as fs:
            assert_same(streamed(fs), near)
        assert sum(sizes(tmp_path / size)) <= 20_000
    monkeypatch.setattr("teachonce.store.containers.disk_cache.os.rename", full)
    fs = open_store(URL, cache=f"disk:{tmp_path / 'full'},1GB")
    assert_same(streamed(fs), near)
    fs.close()
    assert sum("No space left on device; free some space" in line for line in caplog.messages) == 1
    fs = open_store(URL, cache=f"disk:{tmp_path / 'gone'},1GB")
    shutil.rmtree(tmp_path / "gone")
    s3.weather = Weather(
        {"flipped": 1.0}, lambda _, path: "id/c" in path and not s3.weather.met["flipped"]
    )
    assert_same(streamed(fs), near)
    assert s3.weather.met["flipped"] == 1


def full(*_: object) -> None:
    raise OSError(28, os.strerror(28))
