"""Captures of logits become stores whose rows are the teacher's values for the next token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from teachonce.store import open_store
from tests.feature_store.captures.conftest import imported, run
from tests.making.captures import Taught, distillkit, megatron, stacked


@pytest.mark.parametrize("packed", (False, True))
def test_distillkit(packed: bool, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    source = distillkit(tmp_path / "capture", samples, 16, 16, packed_rows=packed)
    said = imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact")
    assert f"distillkit, {len(samples)} samples, topk:16" in said and "left out" not in said
    store = open_store(tmp_path / "a.zarr")
    assert store.features.logits and store.features.logits.next_token
    assert (store.features.logits.size, len(store)) == (16, len(samples))
    for record, sample in zip(store, samples, strict=True):
        logits = record.views[0].logits
        assert record.text == sample.text
        assert record.token_ids.tolist() == sample.ids.tolist()
        best = np.take_along_axis(sample.logprobs, logits.ids.astype(np.int64), 1)
        assert np.abs(best[:, 0] - sample.logprobs.max(1)).max() < 0.05
        assert np.abs(logits.logprobs - best).max() < 0.05
        left = np.log1p(-np.exp(logits.logprobs.astype(np.float64)).sum(1))
        assert np.abs(logits.rest - left).max() < 0.01
        assert not logits.log_partition.any()


def test_distillkit_with_a_curve_for_the_tail(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """The fitted curve is near the teacher's tail."""
    source = distillkit(tmp_path / "capture", samples, 8, 24)
    imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact")
    for record, sample in zip(open_store(tmp_path / "a.zarr"), samples, strict=True):
        logits = record.views[0].logits
        best = np.take_along_axis(sample.logprobs, logits.ids.astype(np.int64), 1)
        assert np.abs(logits.logprobs - best).mean() < 0.2
        assert (np.diff(logits.logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_megatron(dp: int, cp: int, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """Ranks of data have microbatches in turn, ranks of context have chunks of each sequence."""
    length = 16
    ids, logprobs = stacked(samples[:12], length)
    np.save(tmp_path / "tokens.npy", ids)
    micro = logprobs.split(2, dim=1)  # 6 microbatches of 2 sequences
    per_step = 2  # microbatches of an iteration, of all ranks
    batches = [micro[at : at + per_step] for at in range(0, 6, per_step)]
    source = megatron(tmp_path / "run", batches, 8, dp, cp)
    said = imported(
        source, tmp_path / "a.zarr", teacher, "--tokens", tmp_path / "tokens.npy", "--codec",
        "exact",
    )  # fmt: skip
    assert "megatron, 12 samples, topk:8" in said
    store = open_store(tmp_path / "a.zarr")
    found = {tuple(record.token_ids.tolist()): record for record in store}
    assert len(found) == len(store)
    kept = 0
    for row, sample in zip(ids.tolist(), samples, strict=False):
        if (record := found.get(tuple(row))) is None:
            continue  # cut inside a word
        logits = record.views[0].logits
        best = np.take_along_axis(sample.logprobs[:length], logits.ids.astype(np.int64), 1)
        assert np.abs(logits.logprobs - best).max() < 0.01
        assert np.abs(best[:, 0] - sample.logprobs[:length].max(1)).max() < 0.01
        kept += 1
    assert kept >= 8


def test_megatron_with_a_nucleus(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """Empty entries beyond Megatron's nucleus add to the rest, and their ids are ignored."""
    ids, logprobs = stacked(samples[:4], 16)
    np.save(tmp_path / "tokens.npy", ids)
    source = megatron(tmp_path / "run", [[logprobs]], 32, nucleus=0.03)
    tokens = ("--tokens", tmp_path / "tokens.npy", "--codec", "exact")
    assert "fewer than k ids" in imported(source, tmp_path / "a.zarr", teacher, *tokens)
    for record in open_store(tmp_path / "a.zarr"):
        logits = record.views[0].logits
        empty = np.isneginf(logits.logprobs)
        assert empty.any() and not empty[:, 0].any()
        assert (logits.ids[empty] == np.broadcast_to(logits.ids[:, :1], empty.shape)[empty]).all()
        mass = np.exp(logits.logprobs.astype(np.float64)).sum(1) + np.exp(logits.rest)
        assert np.abs(mass - 1).max() < 1e-3


def test_texts_of_a_packed_sequence_are_documents(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """The token that ends a text is left out with its row, as it is not in the text."""
    end = 0  # <|endoftext|>
    whole = np.concatenate([[*sample.ids.tolist(), end] for sample in samples[:4]])
    logprobs = torch.log_softmax(torch.arange(600.0) / 60, -1).repeat(len(whole), 1, 1)
    np.save(tmp_path / "tokens.npy", whole[None])
    source = megatron(tmp_path / "run", [[logprobs]], 8)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    imported(
        source, tmp_path / "a.zarr", tmp_path / "tokenizer", "--tokens", tmp_path / "tokens.npy"
    )
    store = open_store(tmp_path / "a.zarr")
    assert [record.text for record in store] == [sample.text for sample in samples[:4]]
    assert [record.document for record in store] == [0, 1, 2, 3]
    assert [record.hard_cut for record in store] == [True, False, False, False]


def test_a_store_of_logits_becomes_a_capture(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """Imported again, it is the same except for the name of the source."""
    first, again = tmp_path / "a.zarr", tmp_path / "b.zarr"
    imported(distillkit(tmp_path / "capture", samples, 8, 24), first, teacher)
    assert run("export", first, tmp_path / "made", "--to", "distillkit").exit_code == 0
    imported(tmp_path / "made", again, teacher)
    for one, other in zip(open_store(first), open_store(again), strict=True):
        a, b = one.views[0].logits, other.views[0].logits
        assert one.text == other.text
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)
