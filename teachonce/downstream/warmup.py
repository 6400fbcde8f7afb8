"""A Trainer whose warm-up ends before the last step."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


class WarmupTrainer(Trainer):
    """Ends the warm-up before the last step.

    In transformers, the first step of a warm-up has a rate of 0: a training of one step, whose
    warm-up is that step, would train nothing.
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule; see the class."""
        warmup = self.args.get_warmup_steps(num_training_steps)
        self.args.warmup_steps = min(warmup, num_training_steps - 1)
        return super().create_scheduler(num_training_steps, optimizer)
