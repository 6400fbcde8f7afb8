"""The shared training loop, with a small training of its own."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from teachonce.support.errors import UserError
from teachonce.support.signals import Stopped, stoppable
from teachonce.training.loop import Losses, Training

STEPS = 8


class Line(Training):
    """Fit a line to points, with dropout; store the checkpoints in a list."""

    def __init__(self, seed: int = 0, batches: int = 1, clip: float = 1.0, every: int = 3) -> None:
        torch.manual_seed(11)
        super().__init__(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)), seed, clip
        )
        self.steps, self.batches, self.every = STEPS, batches, every
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seen: list[Losses] = []
        self.saved: list[dict[str, Any]] = []
        self.fails_at, self.stops_at = STEPS + 1, STEPS + 1
        self.scale = 1.0

    def _batches(self) -> Iterator[tuple[int, int]]:
        if self.step + 1 == self.fails_at:
            raise RuntimeError("no batch")
        return ((number, number) for number in range(self.batches))

    def losses(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        data = torch.Generator().manual_seed(100 * self.step + number)
        points = torch.randn(16, 4, generator=data)
        error = (self.model(points)[:, 0] - points.sum(dim=1)).square().mean() * self.scale
        return error, {"error": error, "number": torch.tensor(float(number))}

    def updates(self) -> Iterator[Losses]:
        while self.step < self.steps:
            yield self.update(0.01, self._batches(), self.losses, self.batches)

    def after(self, losses: Losses, progress: Any) -> None:
        self.seen.append(losses)
        if self.step == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_due(self) -> bool:
        return self.step % self.every == 0

    def save(self) -> None:
        self.saved.append(copy.deepcopy(self.state()))

    def fit(self) -> Line:
        with stoppable(lambda: "kept") as stop:
            self.run(stop, "line")
        return self

    def weights(self) -> list[list[float]]:
        return [each.flatten().tolist() for each in self.model.state_dict().values()]


def test_a_training_goes_on_from_any_checkpoint_along_the_same_curve() -> None:
    whole = Line().fit()
    assert [each["step"] for each in whole.saved] == [3, 6]
    assert whole.step == STEPS and whole.seen[-1]["loss"] < whole.seen[0]["loss"]
    for state in whole.saved:
        resumed = Line()
        torch.manual_seed(state["step"])  # random numbers drawn earlier have no effect on it
        resumed.restore(state)
        resumed.fit()
        assert resumed.seen == whole.seen[state["step"] :]
        assert resumed.weights() == whole.weights()


def test_dropout_follows_the_seed_and_the_step() -> None:
    assert Line(seed=1).fit().seen == Line(seed=1).fit().seen != Line(seed=2).fit().seen


def test_a_signal_stops_between_two_steps_and_saves() -> None:
    training = Line()
    training.stops_at = 4
    with pytest.raises(Stopped):
        training.fit()
    assert training.step == 4 and [each["step"] for each in training.saved] == [3, 4]
    resumed = Line()
    resumed.restore(training.saved[-1])
    assert resumed.fit().weights() == Line().fit().weights()


def test_an_error_in_a_step_leaves_the_last_checkpoint_as_it_was() -> None:
    training = Line()
    training.fails_at = 5
    with pytest.raises(RuntimeError, match="no batch"):
        training.fit()
    assert [each["step"] for each in training.saved] == [3]
    resumed = Line()
    resumed.restore(training.saved[0])
    assert resumed.fit().weights() == Line().fit().weights()


def test_losses_are_means_over_the_batches_of_a_step() -> None:
    training = Line(batches=3).fit()
    assert all(losses["number"] == pytest.approx(1) for losses in training.seen)
    assert all(losses["loss"] == pytest.approx(losses["error"]) for losses in training.seen)


def test_a_step_follows_the_gradient_of_the_mean_loss_clipped() -> None:
    """An update with SGD at learning rate 1 equals the clipped gradient of the mean loss."""
    for clip in (1e9, 0.5):
        training = Line(batches=3, clip=clip)
        training.model.eval()  # without dropout
        training.optimizer = torch.optim.SGD(training.model.parameters())
        parameters = list(training.model.parameters())
        losses = torch.stack([training.losses(number)[0] for number in range(3)])
        wanted = nn.utils.parameters_to_vector(torch.autograd.grad(losses.mean(), parameters))
        wanted = wanted * min(1, clip / float(wanted.norm()))
        before = nn.utils.parameters_to_vector(parameters).detach().clone()
        training.update(1.0, training._batches(), training.losses, 3)
        after = nn.utils.parameters_to_vector(parameters).detach()
        torch.testing.assert_close(before - after, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("done", "words"),
    [
        (1, r"step 2: training has diverged \(error .*, loss .* lower --lr \(now 0\.01"),
        (0, r"step 1: training cannot start \(error .*, loss .* values of the training data"),
    ],
)
def test_a_training_that_diverges_names_the_step_and_the_rate(
    scale: float, done: int, words: str
) -> None:
    training = Line()
    training.scale, training.step = scale, done
    before = training.weights()
    with pytest.raises(UserError, match=words):
        training.fit()
    assert training.weights() == before and training.saved == []
