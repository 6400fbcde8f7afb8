"""One writer for each store, with and without locks, on one machine and on several."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.processes import finish
from teachonce.store import StoreWriter, UserError, open_store
from teachonce.store.tools.verify import verify
from teachonce.support.lease import Lease, check_free, lease_path
from tests.making.stores import SMALL, begin, make_part, make_store, put_part
from tests.support.leased import Writer, held

EXT = ("zarr", "h5")


@pytest.mark.parametrize("ext", EXT)
def test_a_second_writer_is_refused_by_name(tmp_path: Path, ext: str) -> None:
    store = tmp_path / f"a.{ext}"
    with Writer(store) as first:
        assert first.answer() == "done"
        assert first.request(0) == "done"
        with Writer(store) as second:
            line = second.answer()
        since = json.loads(lease_path(store).read_text())["since"]
        assert f"process {first.pid} on {socket.gethostname()} since {since}" in line
        assert "another process is writing it" in line
        with pytest.raises(UserError, match=f"process {first.pid} on"):
            check_free(store)
        assert first.request(1) == first.request("seal") == "done"
    assert [path.name for path in tmp_path.iterdir()] == [store.name]
    assert verify(store).problems == []


@pytest.mark.parametrize("words", [(), ("--lockless",)], ids=["locks", "no locks"])
def test_a_dead_writer_is_replaced_at_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    store = tmp_path / "a.zarr"
    with Writer(store, *words) as first:
        assert first.answer() == first.request(0) == "done"
        with Writer(store, *words) as early:
            assert f"process {first.pid} on" in early.answer()
        first.process.kill()
        finish(first.process)
    with Writer(store, *words) as second:
        assert second.answer() == second.request(1) == second.request("seal") == "done"
    assert len(open_store(store).manifest.parts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


def test_a_process_number_that_is_used_again_is_not_the_writer(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    with Writer(store, "--lockless") as first:
        assert first.answer() == "done"
        first.process.kill()
    left = json.loads(lease_path(store).read_text())
    lease_path(store).write_text(json.dumps({**left, "pid": os.getpid()}))
    with Writer(store, "--lockless") as second:
        assert second.answer() == "done"


def test_a_writer_on_another_machine(tmp_path: Path) -> None:
    """A writer on another machine counts as alive while its heartbeats arrive, whatever its pid."""
    store = tmp_path / "a.zarr"
    beat = ("--beat", "0.3")
    with Writer(store, "--elsewhere", "--lockless", *beat) as first:
        assert first.answer() == "done"
        time.sleep(2)  # longer than the missed heartbeats after which it counts as dead
        with Writer(store, "--lockless", *beat) as second:
            assert "on far since" in second.answer()
        first.process.kill()
        finish(first.process)
        time.sleep(1)
        with Writer(store, "--lockless", *beat) as second:
            assert second.answer() == second.request(0) == second.request("seal") == "done"


@pytest.mark.parametrize("ext", ["zarr", pytest.param("h5", marks=pytest.mark.apart)])
def test_a_writer_that_lost_its_lease_stops(tmp_path: Path, ext: str) -> None:
    store = tmp_path / f"a.{ext}"
    beat = ("--lockless", "--beat", "0.3")
    with Writer(store, "--elsewhere", *beat) as first:
        assert first.answer() == first.request(0) == "done"
        os.kill(first.pid, signal.SIGSTOP)
        time.sleep(1.2)
        with Writer(store, *beat) as second:
            assert second.answer() == second.request(1) == "done"
            os.kill(first.pid, signal.SIGCONT)
            line = first.request(2)
            assert "has taken over its lease" in line
            assert f"process {second.pid} on" in line
            assert second.request(2) == second.request("seal") == "done"
    assert [part.number for part in open_store(store).manifest.parts] == [0, 1, 2]
    assert verify(store).problems == []
    assert [path.name for path in tmp_path.iterdir()] == [store.name]


def test_of_many_that_begin_together_one_writes(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    writers = [Writer(store) for _ in range(4)]
    try:
        answers = [writer.answer() for writer in writers]
    finally:
        for writer in writers:
            writer.__exit__()
    assert sorted(answer == "done" for answer in answers) == [False, False, False, True]


def test_a_lease_that_somebody_removed(tmp_path: Path) -> None:
    store = tmp_path / "a.h5"
    writer = begin(store, SMALL)
    put_part(writer, 0, make_part(SMALL, 0))
    lease_path(store).unlink()
    with pytest.raises(UserError, match=r"its lease \.a\.h5\.lease was removed.*run the same"):
        put_part(writer, 1, make_part(SMALL, 1))
    writer = begin(store, SMALL)
    assert writer.published == {0}
    writer.seal()


def test_a_lease_that_cannot_be_read(tmp_path: Path) -> None:
    """An unreadable lease counts as held while it is recent, and as free when it is old."""
    lease_path(tmp_path / "a.zarr").write_text("{")
    with pytest.raises(UserError, match="another process is writing it"):
        begin(tmp_path / "a.zarr", SMALL)
    os.utime(lease_path(tmp_path / "a.zarr"), (0, 0))
    begin(tmp_path / "a.zarr", SMALL).close()


def test_a_lease_from_the_future(tmp_path: Path) -> None:
    """If a lease has a future timestamp, its silence is counted from now: a clock was set back."""
    store = tmp_path / "a.zarr"
    path = lease_path(store)
    path.write_text(json.dumps({"token": "t", "pid": 1, "host": "far", "boot": "far"}))
    ahead = time.time() + 86_400
    os.utime(path, (ahead, ahead))
    with pytest.raises(UserError, match="process 1 on far .* last heartbeat 0 s ago"):
        check_free(store)
    assert abs(path.stat().st_mtime - time.time()) < 60
    with pytest.raises(UserError, match="another process is writing it"):
        check_free(store)
    later = path.stat().st_mtime - 61
    os.utime(path, (later, later))
    check_free(store)


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe"])
def test_a_lease_that_is_no_file(tmp_path: Path, kind: str) -> None:
    """A lease that is a link, folder or pipe is refused: it is neither overwritten nor awaited."""
    lease, precious = lease_path(tmp_path / "a.zarr"), tmp_path / "precious"
    precious.write_text("precious")
    os.utime(precious, (0, 0))
    make: dict[str, Callable[[], object]] = {
        "link": lambda: lease.symlink_to(precious),
        "dangling link": lambda: lease.symlink_to(tmp_path / "none"),
        "folder": lease.mkdir,
        "pipe": lambda: os.mkfifo(lease),
    }
    make[kind]()
    for refused in (lambda: check_free(tmp_path / "a.zarr"), lambda: Lease(tmp_path / "a.zarr")):
        with pytest.raises(UserError, match="is not a lease but a link, folder or device"):
            refused()
    assert precious.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [lease.name, "precious"]


@pytest.mark.parametrize("links", [True, False])
def test_a_lease_has_its_name_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """A writer that is killed while it creates its lease does not block other writers."""
    store, real = tmp_path / "a.zarr", os.link

    def killed(*_: object, **__: object) -> None:
        os._exit(0)

    pid = os.fork()
    if pid == 0:
        os.link = killed
        Lease(store)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0 and not lease_path(store).exists()
    assert len(list(tmp_path.iterdir())) == 1

    def unable(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", real if links else unable)
    lease = Lease(store)
    assert json.loads(lease_path(store).read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [lease_path(store).name]
    lease.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("boot", "silent", "taken"), [
    ("far", 600, True),
    ("far", 5, False),
    ("here", 600, False),
])  # fmt: skip
def test_a_lock_that_is_kept_for_another_machine(
    tmp_path: Path, boot: str, silent: int, taken: bool
) -> None:
    """If a file server still holds the lock of a dead machine, missing heartbeats free the
    lease."""
    with Writer(tmp_path / "a.zarr") as holder:
        assert holder.answer() == "done"
        path = lease_path(tmp_path / "a.zarr")
        if boot == "far":
            path.write_text(json.dumps({**json.loads(path.read_text()), "boot": boot}))
        heard = time.time() - silent
        os.utime(path, (heard, heard))
        if taken:
            Lease(tmp_path / "a.zarr").close()
        else:
            with pytest.raises(UserError, match="another process is writing it"):
                Lease(tmp_path / "a.zarr")


@pytest.mark.parametrize("ext", EXT)
def test_a_refused_dump_leaves_the_lease_of_a_repair(tmp_path: Path, ext: str) -> None:
    """A refused dump leaves the lease and the parts that a repair of HDF5 has just copied."""
    store = tmp_path / f"a.{ext}"
    make_store(store, SMALL, parts=1)
    parts = tmp_path / "a.h5.parts"
    with held(store) as holder:
        if ext == "h5":
            parts.mkdir()
            (parts / "0.h5").write_text("a sound part")
        with pytest.raises(UserError, match=f"process {holder.pid} on"):
            StoreWriter.check_writable(store)
        with pytest.raises(UserError, match=f"process {holder.pid} on"):
            Lease(store)
        assert ext == "zarr" or (parts / "0.h5").exists()
    with pytest.raises(UserError, match="exists already and is finished"):
        StoreWriter.check_writable(store)
    assert [path.name for path in tmp_path.iterdir()] == [store.name]
