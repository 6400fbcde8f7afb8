"""The measurements that look for a reason: their figures where the answer is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import decoders, frozen_projection, projection_starts, starts
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.end_to_end.support import ok, refused, says
from tests.texts import ENGLISH


def rows_of(results: Path) -> list[list[str]]:
    """Read the cells of all lines of tables that hold figures."""
    lines = [line for line in results.read_text().splitlines() if line.startswith("| ")]
    return [cells for line in lines if "---" not in (cells := line.strip("| ").split(" | "))]


def test_directions_counts_those_in_use() -> None:
    random = np.random.default_rng(0).normal(size=(4000, 6))
    assert frozen_projection.directions(random) == pytest.approx(6, abs=0.05)
    line = random[:, :1] * np.arange(1, 7)
    assert frozen_projection.directions(line) == pytest.approx(1, abs=1e-6)


def test_explained_is_all_of_a_linear_map_and_nothing_of_chance() -> None:
    random = np.random.default_rng(0)
    own, other = random.normal(size=(4000, 6)), random.normal(size=(4000, 9))
    assert frozen_projection.explained(own, own @ random.normal(size=(6, 9)) + 3) > 0.999
    assert abs(frozen_projection.explained(own, other)) < 0.02


def test_a_random_map_reaches_as_large_a_share_as_its_width() -> None:
    states = np.random.default_rng(1).normal(size=(4000, 8))
    assert frozen_projection.reachable(states, 4) == pytest.approx(0.5, abs=0.03)
    assert frozen_projection.reachable(states, 8) == pytest.approx(1)


def test_frozen_projections_of_students_of_a_reproduction(
    tiny_teacher: Callable[..., Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, results = tmp_path / "kolesnikova", tmp_path / "RESULTS.md"
    place.mkdir()
    words = ("--work", tmp_path, "--seeds", 1, "--results", results)
    store = place / "plain.zarr"
    dump(DumpOptions(model=str(tiny_teacher("bert")), corpus=(str(corpus),), out=store, limit=2000))
    monkeypatch.setattr(frozen_projection, "ARMS", ("none", "MSE RF"))
    monkeypatch.setattr(frozen_projection, "HELD_OUT", 0.5)
    for name, loss in (("none", {"mlm": 1.0}), ("MSE-RF", {"mlm": 1.0, "hidden-raw-sum": 1.0})):
        options = TrainOptions(
            store=str(store), vocab="200", student="16x1x2", loss=loss, steps=2, batch_tokens=256,
            held_out=0.2, out=place / f"{name}-0",
        )  # fmt: skip
        run(options)
    ok(frozen_projection.main, *words)
    head, none, frozen = rows_of(results)
    assert none[:2] == ["400 steps", "none"] and none[3] == "" and float(frozen[3]) > 0
    assert all(0 < float(row[6]) <= 16 and float(row[7]) < 1 for row in (none, frozen))
    assert len(head) == len(none) == len(frozen)
    shutil.rmtree(place / "none-0")
    told = refused(frozen_projection.main, *words)
    says(told, "none-0: no such student", "benchmarks.reproduce kolesnikova")


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """Write words with tags, as EWT has them; the name of the files without their split."""
    for split in ("train", "dev"):
        words = "\n".join(f"{word}\tT{len(word)}" for word in ENGLISH[0].split())
        (tmp_path / f"ewt.{split}.tsv").write_text(f"{words}\n\n" * 20, "utf-8")
    return tmp_path / "ewt"


@pytest.mark.slow
def test_projections_of_each_start_mode_and_reduction(
    tiny_teacher: Callable[..., Path],
    corpus: Path,
    tmp_path: Path,
    tagged: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tuple(Path(f"{tagged}.{split}.tsv") for split in ("train", "dev"))
    monkeypatch.setattr(projection_starts, "TAGS", files)
    monkeypatch.setattr(projection_starts, "MODES", ("frozen",))
    results = tmp_path / "RESULTS.md"
    given = ("--work", tmp_path / "w", "--model", tiny_teacher("bert"), "--corpus", corpus)
    small = ("--tokens", 3000, "--vocab", "200", "--student", "16x2x2", "--seeds", 1)
    ok(projection_starts.main, *given, *small, "--steps", "2", "--results", results)
    head, alone, *rows = rows_of(results)
    assert head[-1] == "share that varies" and alone[:4] == ["2", "", "", "MLM alone"]
    assert [row[1:4] for row in rows] == [
        ["frozen", start, over] for start in ("he", "pytorch") for over in ("sum", "mean")
    ]
    assert all(0 < float(row[4]) < 10 and 0 <= float(row[6]) <= 1 for row in rows)


@pytest.mark.slow
def test_starts_name_the_layers_of_each_group(
    tiny_teacher: Callable[..., Path],
    corpus: Path,
    tmp_path: Path,
    tagged: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starts, "EWT", tagged)
    monkeypatch.setattr(starts, "STUDENTS", {"bert:16x2x2": 2})
    results = tmp_path / "RESULTS.md"
    ok(
        starts.main,
        *("--work", tmp_path / "w", "--model", tiny_teacher("bert"), "--corpus", corpus),
        *("--tokens", 3000, "--vocab", "200", "--seeds", 1, "--results", results),
    )
    rows = rows_of(results)[1:]
    assert [row[3] for row in rows] == ["teacher", "layers:1,3", "layers:2,4"]
    assert all(0 < float(row[4]) < 10 for row in rows)


@pytest.mark.apart
def test_decoders_of_each_start_and_loss(
    tiny_teacher: Callable[..., Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoders, "HELD_OUT", slice(0, 2000))
    monkeypatch.setattr(decoders, "BATCH", 256)
    results = tmp_path / "RESULTS.md"
    given = ("--work", tmp_path / "w", "--model", tiny_teacher("gpt2"), "--corpus", corpus)
    small = ("--stored", 3000, "--vocab", "300", "--student", "llama:16x1x2", "--tokens", 600)
    arms = ("--arms", "vocab, next;vocab, default", "--rates", "1e-3,2e-3")
    ok(decoders.main, *given, *small, *arms, "--seeds", 2, "--results", results)
    head, plain, default = rows_of(results)
    assert head[0] == "start, losses" and plain[0] == "vocab, next"
    assert plain[3] == "+0.000 ± 0.000" and 2 < float(plain[2].split()[0]) < 9
    gain = float(default[2].split()[0]) - float(plain[2].split()[0])
    assert float(default[3].split()[0]) == pytest.approx(gain, abs=0.002)
