"""A training limits the memory used in addition to model and batch, and restores settings."""

from __future__ import annotations

import os
from typing import Any

import pytest

from teachonce.support.signals import stoppable
from teachonce.training import loop
from teachonce.training.loop import (
    CAPACITY,
    EVERY,
    PRIMITIVES,
    Losses,
    limit_primitive_cache,
    release_memory,
)
from tests.training.test_loop import STEPS, Line


class Watched(Line):
    """Record at each step how many primitives oneDNN may cache."""

    def after(self, losses: Losses, progress: Any) -> None:
        super().after(losses, progress)
        self.printed = os.environ.get(CAPACITY)


def test_a_training_keeps_few_primitives_and_gives_freed_blocks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CAPACITY, raising=False)
    given: list[int] = []
    training = Watched()
    monkeypatch.setattr(loop, "release_memory", lambda: given.append(training.step))
    with stoppable() as stop:
        training.run(stop, "train")
    assert training.printed == PRIMITIVES and CAPACITY not in os.environ
    assert given == list(range(EVERY, STEPS + 1, EVERY)) != []
    release_memory()  # harmless, wherever it is set


def test_a_number_that_somebody_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY, "9")
    with limit_primitive_cache():
        assert os.environ[CAPACITY] == "9"
    assert os.environ[CAPACITY] == "9"
