"""Networks that fail: passing faults are retried, lasting faults are named, neither is damage."""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import StoreError, Unreachable, open_store
from teachonce.store.containers import network
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.verify import verify
from tests.rough_network import BUCKET, S3, Weather
from tests.store.containers.far_stores import assert_same, streamed

URL = f"s3://{BUCKET}/a.zarr"
ACCUSATIONS = ("damaged", "dump again", "restore")


@pytest.fixture(scope="module")
def holder(server: S3, small: Path) -> S3:
    """Serve the store; only the options name the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ENDPOINT_URL")
        upload(small, URL, server.options)
    return server


@pytest.fixture
def s3(holder: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Serve S3 without faults, for readers with short waits."""
    holder.weather = Weather()
    for name, value in (("FIRST_PAUSE", 0.01), ("PATIENCE", 20.0), ("FIRST_PATIENCE", 20.0)):
        monkeypatch.setattr(network, name, value)
    return holder


@pytest.fixture
def hurry(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE", "FIRST_PATIENCE"):
        monkeypatch.setattr(network, name, 0.3)


PASSING = (
    {"503": 0.3}, {"reset": 0.3}, {"torn": 0.3}, {"short": 0.1}, {"flipped": 0.1},
    {"unmatched": 0.1}, {"404": 0.2}, {"slow": 0.5},
)  # fmt: skip


@pytest.mark.parametrize("faults", PASSING, ids=lambda faults: next(iter(faults)))
def test_what_passes_is_waited_for(
    s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, float]
) -> None:
    # Otherwise chance hits the same read each time.
    monkeypatch.setattr("teachonce.store.read.pool.AT_ONCE", 1)
    s3.weather = Weather(
        faults, lambda method, path: "zarr.json" not in path or "404" not in faults
    )
    fs = open_store(URL)
    assert_same(streamed(fs), streamed(open_store(small)))
    assert s3.weather.met[next(iter(faults))] > 0


def test_a_far_store_is_read_by_many_requests_at_once(s3: S3, small: Path) -> None:
    fs = open_store(URL)
    s3.weather = Weather({"503": 0.1, "reset": 0.1}, delay=0.05)
    assert_same(streamed(fs), streamed(open_store(small)))
    assert s3.weather.most > 4


def test_options_alone_name_the_server(
    s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    fs, local = open_store(URL, storage_options=s3.options), open_store(small)
    assert fs.meta == local.meta and fs[17].text == local[17].text
    assert (fs[17].views[0].hidden["mean"] == local[17].views[0].hidden["mean"]).all()
    assert_same(streamed(fs), streamed(local))


def test_a_stream_asks_for_no_metadata_of_parts(s3: S3, small: Path) -> None:
    """A stream requests no metadata of parts: the manifest has the standard metadata's checksum."""
    fs = open_store(URL)
    s3.weather = Weather({"403": 1.0}, lambda method, path: bool(PART_NODE.search(path)))
    batch = next(iter(fs.stream(0, 0, 64)))
    wanted = next(iter(open_store(small).stream(0, 0, 64)))
    np.testing.assert_array_equal(batch.token_ids, wanted.token_ids)
    with pytest.raises(Unreachable, match="parts/0/text/utf8/zarr.json"):
        fs.part(0).read("text/utf8", 0, 9)


def test_a_whole_store_is_verified_in_bad_weather(s3: S3) -> None:
    kinds = ("500", "429", "reset", "truncated", "flipped", "short")
    s3.weather = Weather(dict.fromkeys(kinds, 0.03))
    assert verify(URL).problems == []
    assert all(s3.weather.met[kind] for kind in kinds)


FOREVER = {
    "500": "HTTP 500 InternalError",
    "503": "HTTP 503 SlowDown",
    "reset": "",
    "torn": "response body error",
}


def unreachable(read: Callable[[], object], key: str) -> str:
    """Return the line of a read that must fail; it names the object and does not report damage."""
    with pytest.raises(Unreachable) as caught:
        read()
    line = str(caught.value)
    assert line.startswith(f"{URL}: cannot be reached: {key}: ")
    assert "\n" not in line and not any(word in line for word in ACCUSATIONS)
    return line


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("fault", FOREVER)
def test_what_does_not_pass_is_named(s3: S3, fault: str) -> None:
    fs = open_store(URL)
    dead = Weather({fault: 1.0})
    s3.weather = dead
    reads: dict[str, Callable[[], object]] = {
        "zarr.json": lambda: open_store(URL),
        "parts/0/text/utf8/zarr.json": lambda: fs.part(0).read("text/utf8", 0, 9),
        "teacher/files/tokenizer.json/zarr.json": lambda: fs.teacher_file("tokenizer.json"),
    }
    for key, read in reads.items():
        line = unreachable(read, key)
        assert f"{key}: requested " in line and FOREVER[fault] in line and " times in " in line
        assert "check the network, and run the same command again" in line
    with pytest.raises(Unreachable):
        streamed(fs)
    assert dead.met["requests"] == dead.met[fault] > 4


def later(path_part: str) -> Callable[[str, str], bool]:
    return lambda method, path: path_part in path


@pytest.mark.usefixtures("hurry")
def test_every_command_says_it_in_one_line(s3: S3, tmp_path: Path) -> None:
    for strikes in (later("zarr"), later("parts/1/token/id"), later("parts/1/token/id/c/0")):
        s3.weather = Weather({"503": 1.0}, strikes)
        for words in (["verify", URL], ["convert", URL, str(tmp_path / "b.zarr")]):
            refusal(words, "requested", "HTTP 503")
    s3.weather = Weather({"503": 1.0})
    for words in (
        ["info", URL],
        ["show", URL, "0"],
        ["merge", URL, f"{URL}/", str(tmp_path / "c.h5")],
    ):
        refusal(words, "HTTP 503 SlowDown (Please reduce your request rate)")
    s3.weather = Weather()
    convert(URL, tmp_path / "b.zarr")  # continues
    assert verify(tmp_path / "b.zarr").problems == []


def refusal(words: list[str], *printed: str) -> None:
    said = CliRunner().invoke(feature_store, words)
    lines = said.stderr.splitlines()
    assert said.exit_code == 1 and lines[-1].startswith("Error: "), said.output
    assert all(word in lines[-1] for word in printed), lines[-1]
    assert not any(word in said.output for word in ACCUSATIONS), said.output


PART_NODE = re.compile(r"parts/.*zarr\.json")
REFUSALS = {
    "403": ("HTTP 403 AccessDenied", "do not permit this", "AWS_ACCESS_KEY_ID"),
    "expired": ("HTTP 400 ExpiredToken", "expired: renew them"),
    "unknown key": ("HTTP 403 InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
    "skewed": ("RequestTimeTooSkewed", "the clock of this machine"),
    "redirect": ("HTTP 301 PermanentRedirect", "another region: set AWS_REGION"),
    "region": ("AuthorizationHeaderMalformed", "expecting 'eu-west-1'", "set AWS_REGION"),
}


def _noted(asked: list[str], method: str, path: str) -> bool:
    asked.append(path)
    return True


@pytest.mark.parametrize("answer", REFUSALS)
def test_refusals_are_not_asked_again(s3: S3, small: Path, answer: str) -> None:
    fs = open_store(URL)
    stream = partial(streamed, fs)
    for read in (lambda: open_store(URL), lambda: upload(small, f"s3://{BUCKET}/b.zarr"), stream):
        asked: list[str] = []
        s3.weather = Weather({answer: 1.0}, partial(_noted, asked))
        with pytest.raises(Unreachable) as caught:
            read()
        assert all(word in str(caught.value) for word in REFUSALS[answer]), caught.value
        # A stream requests all arrays of its first parts together, each array once.
        assert len(asked) <= 2 or (read is stream and len(asked) == len(set(asked)))
    refusal(["info", URL], *REFUSALS[answer])


PERMANENT = {
    "whole": ("the server ignores Range and sends whole objects; the server, or a proxy", 1),
    "short": ("bytes of parts/1/token/id/c/0, expected", network.FETCHES),
}


@pytest.mark.parametrize("fault", PERMANENT)
def test_what_repeating_cannot_change_ends_at_once(s3: S3, fault: str) -> None:
    cause, requests = PERMANENT[fault]
    fs, key = open_store(URL), "parts/1/token/id/c/0"
    started = time.monotonic()
    s3.weather = Weather({fault: 1.0}, later(key))
    assert cause in unreachable(lambda: fs.part(1).read("token/id", 0, 9), key)
    assert s3.weather.met[fault] == requests and time.monotonic() - started < 5
    refusal(["verify", URL], cause)
    with pytest.raises(Unreachable):
        streamed(fs)
    assert time.monotonic() - started < 15


def test_a_web_page_in_the_place_of_a_store(s3: S3) -> None:
    s3.weather = Weather({"page": 1.0})
    line = unreachable(lambda: open_store(URL), "zarr.json")
    assert "zarr.json: the server sent a web page" in line
    assert s3.weather.met["requests"] == 1
    refusal(["verify", URL], "the server sent a web page", "a login page")


def test_a_file_system_that_ignores_ranges_is_named(
    small: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, real = list[str](), type(memory).cat_file

    def whole(self: Any, path: str, start: int | None = None, end: int | None = None) -> Any:
        requests.append(path)
        return real(self, path)

    upload(small, "memory://whole.zarr")
    monkeypatch.setattr(type(memory), "cat_file", whole)
    fs = open_store("memory://whole.zarr", storage_options={"skip_instance_cache": True})
    monkeypatch.setattr("teachonce.store.containers.zarr.remote_shards.SMALL", 0)
    with pytest.raises(Unreachable, match="token/id/c/0: the server ignores Range"):
        fs.part(0).read("token/id", 0, 9)
    assert requests.count("/whole.zarr/parts/0/token/id/c/0") == 1


def test_credentials_that_expire_in_the_middle_of_an_epoch(
    s3: S3, small: Path, tmp_path: Path
) -> None:
    """After credentials expire, the data read stay cached, and the same command continues."""
    word = f"disk:{tmp_path / 'cache'},100MB"
    with open_store(URL, cache=word) as fs:
        s3.weather = Weather({"expired": 1.0}, later("parts/1/token"))
        with pytest.raises(Unreachable, match="parts/1/token/.*have expired: renew them") as caught:
            streamed(fs)
        assert "\n" not in str(caught.value)
        s3.weather = Weather()
        assert_same(streamed(fs), streamed(open_store(small)))
    s3.weather = Weather({"503": 1.0}, later("parts/"))
    with open_store(URL, cache=word) as fs:
        assert_same(streamed(fs), streamed(open_store(small)))
    assert not s3.weather.met["503"]


@pytest.mark.slow
def test_what_is_damaged_there_is_called_so(s3: S3, small: Path) -> None:
    key, url = "parts/1/token/id/c/0", f"s3://{BUCKET}/damaged.zarr"
    s3.put(small, "damaged.zarr")
    sound = (small / key).read_bytes()
    s3.write(f"damaged.zarr/{key}", sound[:9] + bytes([sound[9] ^ 4]) + sound[10:])
    with pytest.raises(StoreError, match="array parts/1/token/id: rows .* cannot be decoded"):
        streamed(open_store(url))
    assert [line for line in verify(url).problems if "part 1: array token/id" in line]
    opened = open_store(url)
    assert opened[0].text
    s3.remove(f"damaged.zarr/{key}")
    with pytest.raises(StoreError, match=f"{key} is missing"):
        streamed(opened)
    with pytest.raises(StoreError, match=f"its file {key} is missing"):
        streamed(open_store(url))


def test_what_vanishes_behind_an_open_array_is_no_zeros(s3: S3, small: Path) -> None:
    key, url = "parts/0/token/id/c/0", f"s3://{BUCKET}/vanishing.zarr"
    s3.put(small, "vanishing.zarr")
    fs = open_store(url)
    ids = fs.part(0).array("token/id")
    assert ids.read(0, 5).any()
    s3.write(f"vanishing.zarr/{key}", b"")
    fs.source.forget("parts/0/token/id")
    with pytest.raises(StoreError, match="the file has 0 bytes, too few for its index"):
        fs.part(0).array("token/id").read(0, 5)
    s3.put(small, "vanishing.zarr")
    fs.source.forget("parts/0/token/id")
    assert ids.read(0, 5).any()
    s3.remove(f"vanishing.zarr/{key}")
    assert ids.read(0, 5).any()  # of the data in memory
    fs.source.forget("parts/0/token/id")
    with pytest.raises(StoreError, match=f"{key} is missing"):
        fs.part(0).array("token/id").read(0, 5)
    asked: list[str] = []
    s3.weather = Weather({"503": 1.0}, lambda *each: not _noted(asked, *each))
    (problem,) = verify(url).problems
    assert problem.endswith(f"its file {key} is missing")
    assert sum(key in path for path in asked) <= 3 * network.FETCHES  # read, its chunks, its files


@pytest.mark.slow
@pytest.mark.usefixtures("hurry")
def test_an_upload_that_breaks_off_can_be_made_again(
    s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/broken.zarr"
    s3.weather = Weather({"reset": 1.0}, later("broken.zarr/parts/1"))
    with pytest.raises(Unreachable, match="cannot be reached: parts/1/.*: requested .* time"):
        upload(small, url)
    s3.weather = Weather()
    with pytest.raises(StoreError, match="no Zarr store"):
        open_store(url)
    monkeypatch.setattr(network, "PATIENCE", 20.0)
    s3.weather = Weather(dict.fromkeys(("500", "503", "reset", "torn"), 0.02))
    upload(small, url)
    assert verify(url).problems == []


@pytest.mark.usefixtures("hurry")
def test_nobody_answers() -> None:
    with pytest.raises(Unreachable, match="requested .* time.* in .*error sending request"):
        open_store(URL, storage_options={"endpoint_url": "http://127.0.0.1:1"})


def test_a_slow_network_is_reported(
    s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "QUIET", 0.0)
    s3.weather = Weather({"503": 0.6})
    open_store(URL)
    assert any("HTTP 503 SlowDown" in line and "retrying for up to 20 s" in line
               for line in caplog.messages)  # fmt: skip
