"""Batches of rows of about equal length: laws, and that the Trainer makes such batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from teachonce.downstream.cli import main as downstream
from teachonce.downstream.tasks.length_grouped import (
    POOL,
    POOLS,
    LengthGrouped,
    LengthGroupedTrainer,
)
from tests.downstream.learnable import classified
from tests.end_to_end.support import Words, ok


def batches(rows: LengthGrouped) -> list[list[int]]:
    order, size = [*rows], rows.batch_size
    return [order[first : first + size] for first in range(0, len(order), size)]


@given(st.lists(st.integers(1, 200), max_size=200), st.integers(1, 7), st.integers(0, 3))
def test_every_row_comes_once(lengths: list[int], size: int, epoch: int) -> None:
    rows = LengthGrouped(lengths, size, seed=0)
    rows.set_epoch(epoch)
    found = batches(rows)
    assert sorted(row for batch in found for row in batch) == [*range(len(lengths))]
    assert len(rows) == len(lengths)
    assert all(len(batch) == size for batch in found[:-1])


def test_batches_are_as_narrow_as_their_pool_allows() -> None:
    for count, pools in ((2, 2), (40, POOLS), (POOLS * POOL, POOLS), (10 * POOL, 10)):
        found = batches(LengthGrouped([*range(count * 8)], 8, seed=3))
        widths = sum(max(batch) - min(batch) + 1 for batch in found)
        # Every pool is cut into ranges that do not meet, each pool has about all lengths.
        assert 0.5 * pools < widths / (count * 8) <= pools
        firsts = [min(batch) for batch in found]
        assert count == 2 or firsts not in (sorted(firsts), sorted(firsts, reverse=True))


def test_the_order_is_of_seed_and_epoch_alone() -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        one, two = (LengthGrouped([*range(64)], 4, seed) for _ in range(2))
        for number, rows in enumerate((one, two)):
            torch.manual_seed(number)
            rows.set_epoch(epoch)
        assert [*one] == [*two]
        orders.append({frozenset(batch) for batch in batches(one)})
    assert orders[0] != orders[1] != orders[2] != orders[0]  # other batches, not only later


def test_the_trainer_pads_little_and_tells_the_epoch(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (1 + number * 7 % 64), "labels": number} for number in range(64)]
    met: list[list[int]] = []

    def padded(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        met.append([len(row["input_ids"]) for row in some])
        return {"x": torch.ones(1, 1)}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).sum()}

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_train_epochs=2,
        remove_unused_columns=False, report_to="none", save_strategy="no", use_cpu=True,
    )  # fmt: skip
    LengthGroupedTrainer(
        model=Model(),
        args=arguments,
        train_dataset=rows,
        data_collator=padded,
    ).train()
    epochs = met[:8], met[8:]
    for epoch in epochs:
        assert sorted(length for batch in epoch for length in batch) == [*range(1, 65)]
        assert sum(map(max, epoch)) < 0.9 * 8 * 57  # of batches of any rows: about 57 each
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}


def test_a_row_of_two_texts_is_as_long_as_the_longer_one(tmp_path: Path) -> None:
    rows = [{"input_ids": [[1] * 3, [1] * 5]}, {"input_ids": [[1] * 9, [1] * 2]}]
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = LengthGroupedTrainer(torch.nn.Linear(1, 1), arguments, train_dataset=rows)
    assert trainer._get_train_sampler().lengths.tolist() == [5, 9]


def test_downstream_groups_where_asked(
    tiny_teacher: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LengthGrouped] = []
    sampler = LengthGroupedTrainer._get_train_sampler

    def recorded(*given: Any) -> LengthGrouped:
        made.append(sampler(*given))
        return made[-1]

    monkeypatch.setattr(LengthGroupedTrainer, "_get_train_sampler", recorded)
    files = [classified(tmp_path / f"{name}.tsv", 8, 0) for name in ("train", "dev")]
    words: Words = ("--train", files[0], "--dev", files[1], "--epochs", 1, "--seeds", 1)
    words = ("--task", "classify", "--model", tiny_teacher("bert"), *words, "--seed", 7)
    ok(downstream, *words, "--out", tmp_path / "any")
    assert not made
    ok(downstream, *words, "--out", tmp_path / "grouped", "--group-by-length")
    assert [(len(rows), rows.batch_size, rows.seed) for rows in made] == [(8, 16, 7)]
    scores = json.loads((tmp_path / "grouped/scores.json").read_text())
    assert scores["settings"]["group_by_length"] is True
