"""Variables of torchrun that are not numbers are refused, each in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from teachonce.student_train.batches import _place
from teachonce.support.environment import is_main_process
from teachonce.support.errors import UserError, out_of_memory
from teachonce.teacher_dump.job.option_values import shard_of
from teachonce.training.device import resolved_device
from teachonce.training.ranks import ALONE, _peer_errors, join_ranks


def join() -> None:
    with join_ranks("cpu"):
        pass


@pytest.mark.parametrize(
    ("name", "word", "read"),
    [
        ("RANK", "first", is_main_process),
        ("WORLD_SIZE", "two", lambda: shard_of(None)),
        ("WORLD_SIZE", "²", join),
        ("RANK", "-1", lambda: _place(None, None)),
        ("LOCAL_RANK", "gpu", lambda: resolved_device("cuda")),
    ],
)
def test_a_variable_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, name: str, word: str, read: Callable[[], object]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for variable, number in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, number)
    monkeypatch.setenv(name, word)
    expected = f"^environment variable {name}={word}: expected a whole number, as torchrun sets it;"
    with pytest.raises(UserError, match=expected):
        read()


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert is_main_process() and shard_of(None) is None
    with join_ranks("cpu") as ranks:
        assert ranks == ALONE


def test_an_exhausted_memory_is_not_taken_for_a_process_that_has_ended() -> None:
    with pytest.raises(RuntimeError) as caught, _peer_errors():
        torch.empty(2**60)
    assert out_of_memory(caught.value)
