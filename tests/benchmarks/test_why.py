"""The measurements that look for a reason: their figures where the answer is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import first_layers, frozen_projection, shifted_vocabulary, starts
from teachonce.student_train.model.student_tokenizer import student_tokenizer
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


def test_targets_do_not_shift_in_the_teachers_own_vocabulary(
    tiny_teacher: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shifted_vocabulary,
        "student_tokenizer",
        lambda vocab, store: student_tokenizer("200" if vocab == "5k" else vocab, store),
    )
    results = tmp_path / "RESULTS.md"
    ok(
        shifted_vocabulary.main,
        *("--work", tmp_path / "w", "--model", tiny_teacher("bert"), "--corpus", corpus),
        *("--tokens", 3000, "--student", "16x1x2", "--steps", 2, "--seeds", 1, "--batch-tokens"),
        *(256, "--results", results),
    )
    rows = rows_of(results)
    targets = {tuple(row[:2]): [float(cell) for cell in row[3:]] for row in rows[1:5]}
    for place in ("visible", "masked"):
        own, own_of_ours, entropy, distance = targets["teacher", place]
        assert own == pytest.approx(own_of_ours, abs=1e-3) and distance < 1e-3 and entropy > 0
        assert targets["5k", place][3] > 0.01
    assert [row[0] for row in rows[6:]] == [
        "MLM alone",
        *(f"{kl}, {place} tokens" for kl in ("published KL", "our KL")
          for place in ("visible", "masked")),
    ]  # fmt: skip


def test_first_layers_read_what_they_know(
    tiny_teacher: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "pairs.tsv"
    lines = [f"{a}\t{b}\t{n}" for n, (a, b) in enumerate(zip(ENGLISH, ENGLISH[1:], strict=False))]
    pairs.write_text("\n".join(["text_a\ttext_b\tscore", *lines]) + "\n", encoding="utf-8")
    monkeypatch.setattr(first_layers, "STS", pairs)
    monkeypatch.setattr(first_layers, "TRAINED", ((1, 2),))
    monkeypatch.setattr(first_layers, "LENGTHS", (1,))
    monkeypatch.setattr(first_layers, "READ", 1)
    results = tmp_path / "RESULTS.md"
    ok(
        first_layers.main,
        *("--work", tmp_path / "w", "--model", tiny_teacher("bert"), "--corpus", corpus),
        *("--tokens", 2000, "--seeds", 1, "--results", results),
    )
    rows = rows_of(results)
    strange = {row[0]: float(row[1]) for row in rows[1:13]}  # of 4 layers: whole, 6, 4 and 1
    assert strange["1,2,3,4"] == strange["1,2"] == strange["1,2,3"] == 0
    assert strange["1,3"] > 0 and strange["3,4"] > 0
    assert rows[-1][0] == "1,2" and len(rows[-1]) == 3
    assert "the first ones are number" in results.read_text()


def test_starts_name_the_layers_of_each_group(
    tiny_teacher: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "dev"):
        words = "\n".join(f"{word}\tT{len(word)}" for word in ENGLISH[0].split())
        (tmp_path / f"ewt.{split}.tsv").write_text(f"{words}\n\n" * 20, "utf-8")
    monkeypatch.setattr(starts, "EWT", tmp_path / "ewt")
    monkeypatch.setattr(starts, "STUDENTS", {"16x2x2": 2})
    results = tmp_path / "RESULTS.md"
    ok(
        starts.main,
        *("--work", tmp_path / "w", "--model", tiny_teacher("bert"), "--corpus", corpus),
        *("--tokens", 3000, "--vocab", "200", "--seeds", 1, "--results", results),
    )
    rows = rows_of(results)[1:]
    assert [row[3] for row in rows] == ["teacher", "layers:1,3", "layers:2,4"]
    assert all(0 < float(row[4]) < 10 for row in rows)
