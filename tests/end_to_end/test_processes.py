"""Several processes together train the same student as one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from teachonce.store import open_store
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.support.errors import UserError
from teachonce.training.ranks import join_ranks
from tests.end_to_end.support import ROOT, Words, report_of
from tests.end_to_end.watched import Done, processes, together
from tests.making.dumps import write_corpus
from tests.making.models import Teachers

PLAIN = (
    "--vocab", 400, "--student", "16x2x2", "--batch-tokens", 256, "--steps", 5,
    "--loss", "mlm=1,kl=1,hidden=1", "--clip", 1000, "--eval-every", 2,
    "--device", "cpu", "--precision", "fp32",
)  # fmt: skip
STUDENT = (*PLAIN, "--accumulate", 5, "--dropout", 0.1)


def trained(count: int, words: Words, **watched: Any) -> Done:
    """Train with `count` processes; each saves its first gradient next to the student."""
    out = Path(str(words[words.index("--out") + 1]))
    gradients = out.with_name(f"{out.name}.gradient")
    return processes(count, "teachonce.student_train.cli", words, out.parent, gradients, **watched)


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "student"
    found = trained(1, ("--store", store, *STUDENT, "--out", out))
    assert found.codes == [0], found.said
    return out


def same_curve(one: Path, other: Path) -> None:
    for here, there in zip(curve(one), curve(other), strict=True):
        assert here == pytest.approx(there, rel=1e-4)


def same_gradients(one: str, other: str, count: int) -> None:
    """Each of `count` processes has the gradients of a single process, up to the last bits."""
    wanted = torch.load(f"{one}.0")
    first, *others = (torch.load(f"{other}.{rank}") for rank in range(count))
    for each in others:
        torch.testing.assert_close(each, first, rtol=0, atol=0)
    pairs = zip(wanted, first, strict=True)
    whole, got = (
        torch.cat([each.flatten() for each in some])
        for some in zip(*(pair for pair in pairs if pair[0] is not None), strict=True)
    )
    assert float((whole - got).norm() / whole.norm()) < 1e-6


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.apart)])
def test_gradients_and_losses_are_those_of_one_process(
    store: Path, alone: Path, tmp_path: Path, count: int
) -> None:
    out = tmp_path / "student"
    found = trained(count, ("--store", store, *STUDENT, "--out", out))
    assert found.codes == [0] * count, found.said
    assert "store " in found.said[0] and f"processes {count}" in found.said[0]
    assert not any("store " in each or "start " in each for each in found.said[1:])
    same_gradients(f"{alone}.gradient", f"{out}.gradient", count)
    same_curve(out, alone)
    report = report_of(out)
    assert report["environments"][0]["processes"] == count
    tokens = report_of(alone)["result"]["tokens"]
    assert report["result"]["tokens"] == tokens


@pytest.mark.slow
def test_a_stop_of_one_stops_all_and_another_number_goes_on(
    store: Path, alone: Path, tmp_path: Path
) -> None:
    words = ("--store", store, *STUDENT, "--out", tmp_path / "student")
    stopped = trained(2, words, stopped=1)
    assert 0 not in stopped.codes
    saved = [path.name for path in (tmp_path / "student/checkpoints").iterdir()]
    assert any("3" in name for name in saved), saved
    again = trained(3, (*words, "--resume"))
    assert again.codes == [0] * 3, again.said
    assert "resume    after step 3" in again.said[0]
    assert "processes was 2 and is 3" in again.said[0]
    same_curve(tmp_path / "student", alone)


@pytest.mark.slow
def test_the_texts_of_a_batch_are_shared_if_a_step_has_one(store: Path, tmp_path: Path) -> None:
    """If a step has two texts, one of three processes has no text."""
    one, three = tmp_path / "one", tmp_path / "three"
    words = (
        "--store", store, "--vocab", 400, "--student", "16x2x2", "--batch-texts", 2, "--steps", 5,
        "--loss", "mlm=1,kl=1,hidden=1,attention=1,contrastive=1", "--eval-every", 2,
        "--clip", 1000, "--device", "cpu", "--precision", "fp32",
    )  # fmt: skip
    alone = trained(1, (*words, "--out", one))
    stopped = trained(3, (*words, "--out", three), stopped=1)
    assert alone.codes == [0] and 0 not in stopped.codes, (alone.said, stopped.said)
    assert "processes 3, which share the texts of each batch" in stopped.said[0]
    same_gradients(f"{one}.gradient", f"{three}.gradient", 3)
    again = trained(3, (*words, "--out", three, "--resume"))
    assert again.codes == [0] * 3 and "resume    after step 3" in again.said[0], again.said
    same_curve(three, one)


@pytest.mark.apart
@pytest.mark.parametrize("student", [STUDENT, PLAIN], ids=["accumulated", "no --accumulate"])
def test_torchrun_itself(store: Path, tmp_path: Path, student: Words) -> None:
    alone, out = tmp_path / "alone", tmp_path / "student"
    assert trained(1, ("--store", store, *student, "--out", alone)).codes == [0]
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("-m", "teachonce.student_train.cli", "--store", store, *student, "--out", out)
    found = subprocess.run(
        [*run, *map(str, words)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("store ") == 1
    same_curve(out, alone)


@pytest.mark.slow
def test_embeddings_of_mixed_vocabularies_are_those_of_one_process(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 60)

    def made(count: int, name: str, accumulate: int = 3) -> tuple[Path, Done]:
        out = tmp_path / name
        words = (
            "mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus, "--vocab", 450,
            "--width", 16, "--steps", 4, "--accumulate", accumulate, "--batch-tokens", 256,
            "--max-length", 64, "--device", "cpu", "--precision", "fp32", "--out", out,
        )  # fmt: skip
        gradients = out.with_name(f"{name}.gradient")
        return out, processes(count, "teachonce.teacher_dump.cli", words, tmp_path, gradients)

    one, alone = made(1, "one.zarr")
    two, found = made(2, "two.zarr")
    assert alone.codes == [0] and found.codes == [0, 0], found.said
    same_gradients(f"{one}.gradient", f"{two}.gradient", 2)
    stores = [open_store(path) for path in (one, two)]
    wanted, got = (MixedVocab.of(each).embeddings for each in stores)
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
    lines = [[line for line in said.splitlines() if line.startswith("step 4/4")]
             for said in (*alone.said, *found.said)]  # fmt: skip
    assert lines[0][0].partition("tokens/s")[0].rsplit(" ", 2)[0] in lines[1][0] and not lines[2]
    assert "next: student-train" in found.said[0] and found.said[1] == ""
    assert not (tmp_path / "two.zarr.mixed-vocab").exists()
    *_, refused = made(2, "three.zarr", accumulate=1)
    assert set(refused.codes) == {1}
    assert "--accumulate 1 and 2 processes: a step needs at least one batch" in refused.said[0]


def joins(code: str) -> None:
    with mock.patch("teachonce.training.ranks.installed", lambda: {"code": code, "torch": "2"}):
        try:
            with join_ranks("cpu"):
                print("joined")
        except UserError as error:
            print(error)


def test_a_process_with_other_code_is_refused(tmp_path: Path) -> None:
    found = together(3, tmp_path, lambda rank: (joins, "abc" if rank < 2 else "fed"))
    wanted = f"on {socket.gethostname()}: code is 'fed', and in the first process 'abc'; install"
    assert found.codes == [0] * 3
    for said in found.said:
        assert wanted in said and "joined" not in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_masked_lm_is_that_of_one_process(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 200)

    def trained_mlm(count: int, name: str, *more: str | int) -> Done:
        words = (
            "--task", "mlm", "--model", "scratch:modernbert:16x1x2",
            "--vocab", 400, "--train", corpus,
            "--max-length", 32, "--batch-size", 6, "--steps", 4, "--evaluate-every", 2,
            "--test", corpus, "--out", tmp_path / name, *more,
        )  # fmt: skip
        gradients = tmp_path / f"{name}.gradient"
        return processes(count, "teachonce.downstream.cli", words, tmp_path, gradients)

    alone, found = trained_mlm(1, "one"), trained_mlm(2, "two")
    assert alone.codes == [0] and found.codes == [0, 0], (alone.said, found.said)
    same_gradients(f"{tmp_path}/one.gradient", f"{tmp_path}/two.gradient", 2)
    one, two = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")
    )
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-5)
    assert two["tokens"] == one["tokens"] and "held-out loss after" not in found.said[1]
    scores = json.loads((tmp_path / "two" / "scores.json").read_text())
    assert scores["mean"]["test"]["loss"] > 0 and f"{corpus}: " in found.said[0]
    refused = trained_mlm(2, "three", "--batch-size", 5)
    assert "--batch-size 5 and 2 processes: a batch cannot be divided evenly" in refused.said[0]
    assert set(refused.codes) == {1} and not (tmp_path / "three").exists()
