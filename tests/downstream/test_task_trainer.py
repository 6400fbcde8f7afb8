"""Batches of rows of about equal length: a law, and that the Trainer makes such batches."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from downstream.task_trainer import POOL, LengthGrouped, TaskTrainer


@given(st.lists(st.integers(1, 200), max_size=300), st.integers(1, 7), st.integers(0, 9))
def test_every_row_comes_once_in_sorted_batches(lengths: list[int], size: int, seed: int) -> None:
    torch.manual_seed(seed)
    order = [*LengthGrouped(lengths, size)]
    assert sorted(order) == [*range(len(lengths))]
    assert len(LengthGrouped(lengths, size)) == len(lengths)
    if len(lengths) > POOL * size:
        return
    full = len(lengths) // size * size
    ranges = [
        (min(batch), max(batch))
        for first in range(0, full, size)
        for batch in [[lengths[row] for row in order[first : first + size]]]
    ]
    ranges.sort()
    assert all(left[1] <= right[0] for left, right in zip(ranges, ranges[1:], strict=False))


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    rows = LengthGrouped([*range(64)], 4)
    torch.manual_seed(0)
    one, two = [*rows], [*rows]
    torch.manual_seed(0)
    assert [*rows] == one != two
    firsts = one[::4]
    assert firsts not in (sorted(firsts), sorted(firsts, reverse=True))  # of no curriculum


def test_the_trainer_pads_little(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (1 + number * 7 % 64), "labels": number} for number in range(64)]

    def padded(some: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in some)  # type: ignore[arg-type]
        return {
            "labels": torch.tensor([row["labels"] for row in some]),
            "width": torch.tensor(width),
        }

    trainer = TaskTrainer(
        model=torch.nn.Linear(1, 1),
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, remove_unused_columns=False
        ),
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=padded,
    )
    batches = [*trainer.get_train_dataloader()]
    assert sorted(int(label) for batch in batches for label in batch["labels"]) == [*range(64)]
    assert sorted(int(batch["width"]) for batch in batches) == [*range(8, 65, 8)]
