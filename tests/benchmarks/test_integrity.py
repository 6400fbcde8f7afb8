"""The long checks of integrity, made short; and what a soak measures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.integrity import damage, soak, trials
from benchmarks.integrity.soak import Series, watch
from teachonce.store import open_store

GROWING = """
import sys
held, files = [], []
for line in sys.stdin:
    held.append(bytearray(30 << 20))
    files += [open('/dev/null') for _ in range(5)]
    print(len(held), flush=True)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes 30 MB and five files with every line that it reads."""
    words = [sys.executable, "-c", GROWING]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def grow(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin and child.stdout
    child.stdin.write(b"more\n")
    child.stdin.flush()
    child.stdout.readline()


def test_the_sampler_sees_memory_and_files(child: subprocess.Popen[bytes]) -> None:
    series = Series()
    for _ in range(4):
        grow(child)
        series.sample(child.pid)
    for values in (series.anonymous, series.resident):
        steps = [after - before for before, after in zip(values, values[1:], strict=False)]
        assert all(29 < step < 35 for step in steps), values
    assert [
        after - before for before, after in zip(series.files, series.files[1:], strict=False)
    ] == [5] * 3
    assert not series.flat()


def test_what_is_flat() -> None:
    noise = [100.0, 130, 101, 99, 102, 100, 101, 100]
    assert Series(noise, noise, [9, 12, 10, 9, 10, 10, 9, 10]).flat()
    assert not Series([100.0 + 10 * i for i in range(8)], noise, [9] * 8).flat()
    assert not Series(noise, noise, [9, 10, 11, 12, 13, 14, 15, 16]).flat()
    assert Series(noise, noise, [9] * 8).row("reader")[-1] == "yes"


def test_a_watched_process_must_live(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.02)
    grow(child)
    assert len(watch({"it": child}, 0.2)["it"].files) > 2
    child.kill()
    child.wait()
    with pytest.raises(RuntimeError, match="it ended with -9"):
        watch({"it": child}, 5)


def test_the_table(tmp_path: Path) -> None:
    counts = {"flips": 0, "stores": 2, "forgeries": 0, "characters": 640, "texts": 20}
    counts |= {"launderings": 30, "edits": 0, "tokenizers": 0, "networks": 2}
    rows, wrong = trials.checked(counts, seed=3)
    assert wrong == []
    assert [line.split(" | ")[1:4] for line in rows.splitlines()[2:]] == [
        ["2", "2", "0"], ["30", "30", "0"], ["2", "2", "0"], ["640", "640", "0"], ["20", "20", "0"],
    ]  # fmt: skip


def test_a_finding_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "problems", lambda path: ["something"])
    none = dict.fromkeys(option for *_, option in trials.CHECKS)
    rows, wrong = trials.checked(dict.fromkeys(none, 0) | {"stores": 2}, 3)
    assert "| 2 | 0 | 2 |" in rows and len(wrong) == 2


def test_the_store_of_a_soak(tmp_path: Path) -> None:
    trials.small_dump(tmp_path, tmp_path / "soak.zarr", limit=2000)
    store = open_store(tmp_path / "soak.zarr")
    assert store.features.views == 2 and 1000 < store.meta["tokens"] <= 2000
