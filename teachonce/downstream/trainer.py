"""Adds to a transformers Trainer: metrics for experiment trackers (`--log`), and a warm-up that
ends before the last step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import Trainer, TrainerCallback

from teachonce.training.trackers import RunDescription, Trackers

EVERY = 10  # steps between two logged losses
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "eval_loss": "valid_loss",
}
"""Metric names for trackers, by the names in the Trainer's log."""


@dataclass(frozen=True)
class TrackerSettings:
    """Holds the names of the trackers (`--log`), and the folder (`--out`) of the runs that they
    track."""

    names: Sequence[str] = ()
    out: Path = Path()


NO_TRACKERS = TrackerSettings()


def folder_of(out: Path, seed: int, seeds: int) -> Path:
    """Return the folder of the training with `seed`: `out` for a single training, else its
    subfolder."""
    return out if seeds == 1 else out / f"seed-{seed}"


class TrackedRun(TrainerCallback):
    """Sends the losses and held-out metrics of a Trainer to trackers.

    The tracked run starts with the training, and ends with the `with` block of this object.

    measures: names of the metrics of the Trainer that are sent as `dev_NAME`.
    """

    def __init__(
        self,
        names: Sequence[str],
        facts: RunDescription,
        resume: bool,
        say: Callable[[str], object],
        measures: Sequence[str] = (),
    ) -> None:
        self.names, self.facts, self.resume, self.say = names, facts, resume, say
        self.wanted = LOGGED | {f"eval_{name}": f"dev_{name}" for name in measures}
        self.trackers: Trackers | None = None
        self.step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.trackers is not None:
            self.trackers.close(kind is None)
            with suppress(OSError):  # empty, unless a tracker wrote files there
                self.facts.folder.rmdir()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.names and state.is_world_process_zero:
            self.facts.folder.mkdir(parents=True, exist_ok=True)
            self.trackers = Trackers(self.names, self.facts, self.resume, self.say)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        if self.names and self.step % EVERY == 0:
            # The Trainer itself logs at epochs or validations alone.
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        metrics = {name: logs[key] for key, name in self.wanted.items() if key in (logs or {})}
        if self.trackers is not None and metrics:
            self.trackers.add(metrics, state.global_step)

    def add_scores(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Send the scores of each split, at the last step of the training."""
        if self.trackers is not None:
            metrics = {
                f"{split}_{name}": value
                for split, figures in scores.items()
                for name, value in figures.items()
                if name != "primary"
            }
            self.trackers.add(metrics, self.step)


class WarmupTrainer(Trainer):
    """Ends the warm-up before the last step.

    In transformers, the first step of a warm-up has a learning rate of 0. So a training of one
    step, which would be its warm-up, would train nothing.
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the learning rate schedule; the class describes its warm-up."""
        warmup = self.args.get_warmup_steps(num_training_steps)
        self.args.warmup_steps = min(warmup, num_training_steps - 1)
        return super().create_scheduler(num_training_steps, optimizer)
