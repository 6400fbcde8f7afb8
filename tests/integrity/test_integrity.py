"""The long checks of integrity, shortened; `python -m benchmarks.integrity` makes them all.

- The long checks of integrity, shortened.
- The advised commands repair damaged stores, for a sample of all damages.
- Some commands and a hostile hub; `python -m benchmarks.integrity hubs` tries them all.
- One kill of each kind; `python -m benchmarks.integrity kills` makes many.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from teachonce.feature_store.captures.formats import FORMATS
from tests.integrity import (
    capture_trials,
    damage,
    dead_ends,
    plain_tokenizers,
    shared_kills,
    trials,
)
from tests.integrity.dead_ends import ENDINGS, DeadEnd, Scene, advised
from tests.integrity.hostile_hubs import _judged, ended, given_in


@pytest.mark.apart
def test_the_table() -> None:
    counts = {"flips": 0, "stores": 2, "forgeries": 0, "characters": 640, "texts": 20}
    counts |= {"launderings": 30, "edits": 0, "tokenizers": 0, "networks": 2}
    rows, wrong = trials.checked(3, **counts)
    assert wrong == []
    assert [row[1:4] for row in rows] == [
        [2, 2, 0], [30, 30, 0], [2, 2, 0], [640, 640, 0], [20, 20, 0],
    ]  # fmt: skip


def test_a_finding_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "problems", lambda path: ["something"])
    (row,), wrong = trials.checked(3, stores=2)
    assert row[1:4] == [2, 0, 2] and len(wrong) == 2


def test_plain_tokenizers() -> None:
    rows, wrong = plain_tokenizers.trial(3, seed=5)
    assert wrong == []
    assert {str(row[0]) for row in rows} <= set(plain_tokenizers.KINDS) and rows


def test_a_tokenizer_that_ends_its_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tokenizers, "_use", lambda data: 1 / 0)
    _, wrong = plain_tokenizers.trial(1, seed=5)
    assert len(wrong) == 1 and "exit code 1: {" in wrong[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_forged_captures(kind: str, tmp_path: Path) -> None:
    """A few forged captures of each format are refused or imported, without memory limits."""
    whole, tokenizer = capture_trials.sound(kind, tmp_path), capture_trials.teacher(tmp_path)
    assert capture_trials.outcome(kind, whole, tmp_path / "a.zarr", tokenizer) == ("imported", "")
    for number in range(4):
        how, why = capture_trials.attempt(kind, tmp_path, 3, number, bounded=False)
        assert how in capture_trials.HOW, why


@pytest.mark.parametrize("kind", ("speculators", "vllm"))
def test_another_store_than_the_capture_is_found(kind: str, tmp_path: Path) -> None:
    whole, tokenizer = capture_trials.sound(kind, tmp_path), capture_trials.teacher(tmp_path)
    target = tmp_path / "a.zarr"
    assert capture_trials.outcome(kind, whole, target, tokenizer) == ("imported", "")
    samples = list(capture_trials.READ[kind](whole))
    assert capture_trials.unlike(target, samples, 0) == ""
    assert "tokens left out" in capture_trials.unlike(target, samples[:-1], 0)
    states, observed = samples[1].states, samples[1].observed
    changed: Any = states[2][0] if states else observed
    changed[0] += 1
    assert "of no sample behind" in capture_trials.unlike(target, samples, 0)


CHOSEN = {
    "zarr": ("calibration emptied", "parts lost", "parts/1 doubled", "zarr.json lost"),
    "h5": ("a.h5: teacher emptied", "a.h5: parts lost", "a.h5.parts/1.h5 doubled as part 7",
           "a.h5 truncated"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ext", "cases"),
    [("h5", 1), *(pytest.param(ext, 4, marks=pytest.mark.apart) for ext in ("zarr", "h5"))],
)
def test_no_dead_end(tmp_path: Path, ext: str, cases: int) -> None:
    found = list(dead_ends.tried(tmp_path, ext, cases, 0, CHOSEN[ext]))
    assert [ending for _, _, ending, _ in found if ending not in ENDINGS] == []
    states = Counter(state for state, *_ in found)
    assert set(states) == set(dead_ends.STATES) and max(states.values()) == cases
    assert len({ending for _, _, ending, _ in found}) > 1


def test_what_is_a_dead_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "a.zarr", "merged", ("feature-store", "merge", "b", "a.zarr"), "")
    for line in ("it is damaged", "type the `teacher-dump` command again"):
        with pytest.raises(DeadEnd, match="no command of a merged store"):
            advised(scene, line)
    assert advised(scene, "type `feature-store merge` again") == scene.command


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    given_in(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "begin", "twist"),
    [
        ("--model", "HEAD /user/model", "outside"),
        ("hf://", "GET /api/datasets", "endless"),
        pytest.param("push", "POST /api/repos", "drip_headers", marks=pytest.mark.apart),
    ],
)
def test_a_line_or_the_whole(given: Path, name: str, begin: str, twist: str) -> None:
    assert ended(given, name, begin, twist) == ("one-line error", "")


def test_what_is_wrong() -> None:
    assert _judged("fine", 0, []) == ("worked", "")
    for said, code, outside in (
        *(("Traceback (most recent call last)", 1, []), ("", 1, []), ("Error: a", -9, [])),
        *(("Error: [Errno 27] File too large", 1, []), ("Error: a", 1, ["outside"])),
    ):
        assert _judged(said, code, outside)[0] == "failures"


@pytest.mark.apart
def test_the_other_readers_of_a_disk_cache_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_kills, "READERS", 2)
    assert list(shared_kills.killed_readers(tmp_path, 1, seed=3)) == [""]


@pytest.mark.apart
def test_the_same_command_trains_a_killed_student(tmp_path: Path) -> None:
    assert list(shared_kills.killed_members(tmp_path, 1, seed=3)) == [""]


@pytest.mark.apart
def test_other_numbers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_kills, "READERS", 1)
    monkeypatch.setattr(shared_kills, "digest_of", lambda path: "another")
    (first, last) = shared_kills.killed_readers(tmp_path, 1, seed=3)
    assert "a reader printed" in first and "a reader printed" in last
