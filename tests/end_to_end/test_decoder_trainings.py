"""Decoders support what every student supports: resume, processes, caches, sweeps, several stores,
custom loops."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.settings.terms import NEXT_LOSS
from teachonce.student_train.sweep import main as student_sweep
from tests.end_to_end.support import Words, ok, report_of
from tests.end_to_end.test_processes import same_curve, same_gradients, trained
from tests.making.decoders import random_llama
from tests.making.models import Stores

DECODER: Words = (
    *("--student", "llama:16x2x2", "--vocab", 400, "--held-out", 0.1),
    *("--device", "cpu", "--precision", "fp32"),
)
STEPS: Words = ("--batch-tokens", 256, "--accumulate", 2, "--steps", 5, "--eval-every", 2)


@pytest.fixture(scope="module")
def alone(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    found = trained(1, words)
    assert found.codes == [0], found.said
    return out


def same_student(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_stopped_training_resumes_to_the_same_bytes(
    causal: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    stopped = trained(1, words, stopped=0)
    assert stopped.codes != [0]
    again = trained(1, (*words, "--resume"))
    assert again.codes == [0] and "resume    after step 3" in again.said[0], again.said
    same_student(out, alone)


def test_two_processes_train_what_one_trains(causal: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    found = trained(2, words)
    assert found.codes == [0, 0], found.said
    same_gradients(f"{alone}.gradient", f"{out}.gradient", 2)
    same_curve(out, alone)


def test_a_cache_changes_nothing(causal: Path, alone: Path, tmp_path: Path) -> None:
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1)
    for cache in ("ram", "device"):
        ok(student_train, *words, "--cache", cache, "--out", tmp_path / cache)
        same_student(tmp_path / cache, alone)


@pytest.mark.slow
def test_stores_of_different_texts_are_trained_on_together(
    causal: Path, tiny_store: Stores, tmp_path: Path
) -> None:
    """The second teacher has other tokens, and stored states only."""
    words: Words = ("--store", causal, *DECODER, "--steps", 2, "--loss", "next=1,hidden=1")
    other = tiny_store("bert", 30, attention="none", logits=None)
    ok(student_train, *words, "--store", other, "--out", tmp_path / "both")
    ok(student_train, *words, "--out", tmp_path / "one")
    both, one = (report_of(tmp_path / name)["result"] for name in ("both", "one"))
    assert both["tokens"] > 1.5 * one["tokens"]
    assert both["valid_bits_per_byte"] != one["valid_bits_per_byte"]


@pytest.mark.slow
def test_a_sweep_is_ranked_by_bits_a_byte(causal: Path, tmp_path: Path) -> None:
    """With different losses and vocabularies, also without `next`."""
    out = tmp_path / "sweep"
    words: Words = ("--student", "llama:16x1x2", "--steps", 3, "--batch-tokens", 512)
    words += ("--vocab", 300, "--vocab", "teacher", "--loss", "next", "--loss", "kl-next")
    said = ok(student_sweep, "--store", causal, *words, "--device", "cpu", "--out", out)
    rows = json.loads((out / "sweep.json").read_text())
    bits = [row["valid_bits_per_byte"] for row in rows]
    best = min(rows, key=lambda row: row["valid_bits_per_byte"])
    assert len(bits) == 4 and 3 < min(bits) < max(bits) < 9
    assert f"best      {best['folder']}: valid_bits_per_byte {min(bits):.5g} (bits per" in said
    heading, _, *lines = ([c.strip() for c in line.split("|")[1:-1]]
                          for line in said.splitlines() if line.startswith("| "))  # fmt: skip
    place = heading.index("valid_bits_per_byte")
    assert [line[place] for line in lines] == [f"{each:.5g}" for each in sorted(bits)]
    with (out / "sweep.csv").open() as file:
        found = {float(row["valid_bits_per_byte"]) for row in csv.DictReader(file)}
    assert found == set(bits)
    page = (out / "index.html").read_text()
    assert "Curves of valid_bits_per_byte" in page and "next alone" in page


def test_a_sweep_shows_the_losses_and_rates_that_differ_by_default(
    causal: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    words: Words = ("--student", "gpt2:32x1x4", "--steps", 1, "--batch-tokens", 512)
    words += ("--init", "vocab", "--init", "teacher", "--vocab", 300, "--vocab", "teacher")
    said = ok(student_sweep, "--store", causal, *words, "--device", "cpu", "--out", out)
    rows = json.loads((out / "sweep.json").read_text())
    rates = {(row["init"], row["lr"]) for row in rows}
    assert rates == {("vocab", "0.004"), ("teacher", "0.008")}
    losses = {(row["vocab"], "next-inside" in row["loss"]) for row in rows}
    assert losses == {("300", True), ("teacher", False)}
    assert "| init | vocab | loss | lr |" in said or "| vocab | init | loss | lr |" in said
    assert "<td>0.008</td>" in (out / "index.html").read_text()


def test_the_card_says_in_what_its_figures_are(alone: Path) -> None:
    card = (alone / "README.md").read_text()
    figure = report_of(alone)["result"]["valid_bits_per_byte"]
    assert f"| valid_bits_per_byte | {figure:.5g} |" in card
    assert "`valid_kl-next` is in nats" in card
    assert "`valid_bits_per_byte` is `next` per byte of the text" in card
    assert re.search(r"student's start \| `word embeddings of 397 of 400 pieces", card)


def test_a_loop_of_ones_own_trains_a_decoder(causal: Path) -> None:
    batches = StudentBatches(causal, "400", student="llama:16x2x2", held_out=0.1, batch_tokens=512)
    assert dict(batches.options.loss) == NEXT_LOSS
    torch.manual_seed(0)
    distiller = batches.distiller(random_llama(len(batches.tokenizer), 16, heads=2))
    before = batches.validate(distiller)
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-2)
    for epoch in range(3):
        batches.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            distiller.weighted(distiller(batch)).backward()
            optimizer.step()
    after = batches.validate(distiller)
    assert after["valid_bits_per_byte"] < before["valid_bits_per_byte"] - 1
    assert after["valid_kl-next"] < before["valid_kl-next"]
