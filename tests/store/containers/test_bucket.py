"""Stores that are written into a bucket, part by part, equal stores on a disk."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teachonce.store import StoreError, StoreWriter, Unreachable, UserError, open_store
from teachonce.store.containers import bucket_lease, network
from teachonce.store.containers.bucket import Bucket
from teachonce.store.containers.bucket_lease import BucketLease
from teachonce.store.containers.bucket_staging import BucketStaging
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.lease import Taken, parse_lease
from teachonce.teacher_dump.mixed_vocab.options import StageOneDump
from tests.making.stores import make_store
from tests.rough_network import BUCKET, S3, Weather
from tests.store.containers.far_stores import STATES_ALONE
from tests.store.dying import Killed
from tests.store.write import killed

URL = f"s3://{BUCKET}/dumps/a.zarr"
ROOT = Path(__file__).parents[3]
LEASE = "dumps/.a.zarr.lease"


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """Serve S3 without faults and without objects, for writers with short waits."""
    server.weather = Weather()
    server.clear()
    monkeypatch.setattr(network, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return server


def keys_of(store: Path) -> set[str]:
    files = (file for file in store.rglob("*") if file.is_file())
    return {f"dumps/a.zarr/{file.relative_to(store).as_posix()}" for file in files}


def assert_same(s3: S3, local: Path, tmp_path: Path) -> None:
    """Check that the bucket holds exactly the store's objects, and that nothing is left here."""
    assert open_store(URL).manifest.content() == open_store(local).manifest.content()
    assert s3.held() == keys_of(local)
    assert not list(tmp_path.glob("teachonce-*"))


@pytest.mark.slow
def test_a_store_in_a_bucket_is_that_on_a_disk(s3: S3, small: Path, tmp_path: Path) -> None:
    s3.weather = Weather(dict.fromkeys(("500", "503", "reset", "torn"), 0.03))
    make_store(URL, STATES_ALONE, parts=2)
    assert all(s3.weather.met[fault] for fault in ("reset", "503"))
    s3.weather = Weather()
    assert_same(s3, small, tmp_path)
    assert verify(URL).problems == []
    with pytest.raises(UserError, match="exists already and is finished"):
        make_store(URL, STATES_ALONE, parts=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fatal",
    [
        pytest.param("teacher/files", marks=pytest.mark.apart),
        pytest.param("parts/0/", marks=pytest.mark.apart),
        "parts/1/zarr.json",
        pytest.param("manifest", marks=pytest.mark.apart),
    ],
)
def test_a_torn_upload_is_nothing_and_is_removed(
    s3: S3, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fatal: str,
) -> None:  # fmt: skip
    real = Bucket._put

    async def put(self: Bucket, name: str, data: bytes, **conditions: Any) -> Any:
        if name.startswith(fatal):
            raise Killed
        return await real(self, name, data, **conditions)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Bucket, "_put", put)
        patch.setattr(BucketStaging, "clear", lambda self, mark="": None)
        make_store(URL, STATES_ALONE, parts=2)
    there = {"teacher/files": 0, "parts/0/": 0, "parts/1/zarr.json": 1, "manifest": 2}[fatal]
    if fatal == "teacher/files":
        with pytest.raises(StoreError, match="no Zarr store"):
            open_store(URL)
    elif there:
        with pytest.raises(StoreError, match=f"is not finished \\({there} part"):
            open_store(URL)
        assert len(open_store(URL, allow_partial=True).manifest.parts) == there
    stray = "dumps/a.zarr/parts/1/token/stray"  # with other arguments, or from another release
    if fatal != "manifest":
        s3.write(stray, b"torn")
    make_store(URL, STATES_ALONE, parts=2)
    assert_same(s3, small, tmp_path)


def test_one_writer_at_a_time(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = BucketLease(URL)
    with pytest.raises(Taken, match=f"another process is writing it: process {os.getpid()}"):
        monkeypatch.setattr(bucket_lease, "_leases", {URL: lease})
        raise_if_taken(s3, "elsewhere")
    s3.write(LEASE, s3.read(LEASE).replace(lease.token.encode(), b"0" * 16))
    with pytest.raises(UserError, match="has taken over its lease"):
        lease.check()
    lease.close()
    assert s3.held() == {LEASE}, "a lease that another process has taken over is not ours"
    s3.remove(LEASE)
    with pytest.raises(UserError, match="was removed, so this process may not"):
        lease.check()


def test_a_lease_is_renewed_after_an_outage_that_lost_an_answer(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = BucketLease(URL)
    with monkeypatch.context() as patch:
        patch.setattr(network, "PATIENCE", 0.1)
        s3.weather = Weather({"lost": 1.0}, writes())
        with pytest.raises(Unreachable):
            lease._renew()
    s3.weather = Weather()
    lease.check()
    for _ in range(2):
        before = s3.read(LEASE)
        lease._renew()
        assert s3.read(LEASE) != before
    with pytest.raises(Taken):
        raise_if_taken(s3, "elsewhere")
    before = s3.read(LEASE).replace(lease.token.encode(), b"0" * 16)
    s3.write(LEASE, before)
    with pytest.raises(UserError, match="has taken over its lease"):
        lease._renew()
    assert s3.read(LEASE) == before
    lease.close()


def raise_if_taken(s3: S3, boot: str) -> None:
    """Check a lease as a process on another machine does, or on this machine."""
    data = s3.read(LEASE)
    here = parse_lease(data[: -bucket_lease.NONCE])["boot"]
    s3.write(LEASE, data.replace(here.encode(), boot.encode().ljust(len(here), b"-")))
    bucket_lease._leases.clear()
    bucket_lease.check_free(URL)


def test_the_dead_are_replaced(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    first = BucketLease(URL)
    first._ended.set()
    bucket_lease._leases.clear()
    pid, gone = (f'"pid": {number},'.encode() for number in (os.getpid(), child.pid))
    s3.write(LEASE, s3.read(LEASE).replace(pid, gone))
    second = BucketLease(URL)  # immediately: the process does not exist
    second._ended.set()
    with pytest.raises(Taken):
        raise_if_taken(s3, "elsewhere")
    monkeypatch.setattr(bucket_lease, "MISSED", -1)
    bucket_lease.check_free(URL)  # silent for too long
    third = BucketLease(URL)
    third._renew()
    third.check()
    third.close()
    assert s3.held() == set()


@pytest.mark.apart
@pytest.mark.parametrize("conditions", ["ignored", "refused"])
def test_a_whole_store_on_a_server_without_conditions(
    s3: S3, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    conditions: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(bucket_lease, "SETTLE", 0.01)
    s3.weather = Weather(conditions=conditions)
    make_store(URL, STATES_ALONE, parts=2)
    assert_same(s3, small, tmp_path)


@pytest.mark.parametrize("conditions", ["ignored", "refused"])
def test_a_lease_on_a_server_without_conditions(
    s3: S3, monkeypatch: pytest.MonkeyPatch, conditions: str
) -> None:
    monkeypatch.setattr(bucket_lease, "SETTLE", 0.01)
    s3.weather = Weather(conditions=conditions)
    lease = BucketLease(URL)
    lease._renew()
    lease.check()
    with pytest.raises(Taken):
        raise_if_taken(s3, "elsewhere")
    lease._ended.set()
    s3.write(LEASE, s3.read(LEASE).replace(lease.token.encode(), b"0" * 16))
    with pytest.raises(UserError, match="has taken over"):
        lease._renew()


def writes(path_part: str = "") -> Callable[[str, str], bool]:
    return lambda method, path: method == "PUT" and path_part in path


REFUSED = {
    "403": "do not permit this: .*permissions of the bucket",
    "expired": "ExpiredToken.*have expired: renew them, and run the same command again",
    "full": "QuotaExceeded.*the bucket is full: free some space",
    "redirect": "another region: set AWS_REGION",
    "skewed": "the clock of this machine is wrong",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_bucket_refuses_is_reported_before_the_work(s3: S3, fault: str) -> None:
    s3.weather = Weather({fault: 1.0}, writes())
    with pytest.raises(Unreachable, match=REFUSED[fault]) as caught:
        StoreWriter.check_writable(URL)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("s3://")


@pytest.mark.apart
def test_killed_writers_lose_nothing(s3: S3, small: Path, tmp_path: Path) -> None:
    """Writers that are killed at random moments lose nothing; the next writer continues at once."""
    whole = tmp_path / "whole" / "a.zarr"
    whole.parent.mkdir()
    killed.main(whole)
    chance, kills = random.Random(5), 0
    for _ in range(8):
        command = [sys.executable, "-m", "tests.store.write.killed", URL]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, 2.5))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    killed.main(URL)
    assert kills > 3
    assert open_store(URL).manifest.content() == open_store(whole).manifest.content()
    assert s3.held() == keys_of(whole)


@pytest.mark.apart
@pytest.mark.parametrize("fault", ("expired", "full", "403", "redirect"))
def test_what_a_bucket_refuses_in_the_middle(
    s3: S3, small: Path, tmp_path: Path, fault: str
) -> None:
    s3.weather = Weather({fault: 1.0}, writes("parts/1/"))
    with pytest.raises(Unreachable, match=f"parts/1/.*{REFUSED[fault]}"):
        make_store(URL, STATES_ALONE, parts=2)
    s3.weather = Weather()
    assert StoreWriter.published_counts(URL)[0] == 1
    make_store(URL, STATES_ALONE, parts=2)
    assert_same(s3, small, tmp_path)


def test_bad_input_is_refused_in_one_line(s3: S3) -> None:
    s3.write("dumps/a.zarr/notes.txt", b"mine")
    refusals: dict[str, Callable[[], object]] = {
        "holds objects that are not a store .notes.txt": lambda: StoreWriter.check_writable(URL),
        "no such bucket: check its name": lambda: StoreWriter.check_writable("s3://absent/a.zarr"),
        "must end in .zarr": lambda: StoreWriter.check_writable(f"s3://{BUCKET}/a.h5"),
        "written only to a local path or a bucket": lambda: StoreWriter.check_writable(
            "ftp://a/b.zarr"
        ),
        "writes its checkpoints next to the store": lambda: StageOneDump(
            model="rubert-base", out=URL
        ),
        "only a store at a local path can be repaired": lambda: repair(URL),
    }
    for printed, ask in refusals.items():
        with pytest.raises(UserError, match=printed) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert s3.held() == {"dumps/a.zarr/notes.txt"}


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_a_process_that_ends_after_an_answer_is_not_aborted() -> None:
    words = [sys.executable, "-m", "teachonce.feature_store", "info", URL]
    for _ in range(15):  # without a pause, one of five
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
        assert ended.returncode == 1 and b"no Zarr store at this address" in ended.stderr
