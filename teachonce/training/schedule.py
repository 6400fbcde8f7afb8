"""Learning-rate schedules: warm-up, then linear or cosine decay, or halving on a plateau of the
validation loss; and early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("linear", "cosine", "plateau", "constant")
ENDLESS = ("plateau", "constant")  # do not decay to a last rate, so they have no `end`
# As in Kolesnikova et al. 2022, appendix B; their code waits longer after a halving.
PATIENCE = 3


@dataclass
class Schedule:
    """Computes the learning rate of a step as a factor of the peak rate.

    After `warmup` of all `steps`, `linear` and `cosine` fall from 1 to `end`: cosine along
    half a wave (Loshchilov & Hutter 2017, equation 5, without restarts). `constant` stays at 1, for
    Adadelta, which finds its own rates (Zeiler 2012). `plateau` halves the factor after some
    validations without progress (Kolesnikova et al. 2022). If `patience` is given, the training
    stops early after that number of consecutive validations without progress.
    """

    kind: str
    steps: int
    warmup: int
    best: float = float("inf")
    waited: int = 0
    halvings: int = 0
    end: float = 0.0
    patience: int | None = None
    idle: int = 0  # validations since the best

    def factor(self, step: int) -> float:
        """Return the factor for step 0, 1, ...: a pure function of step and validations so far."""
        if step < self.warmup:
            # Not step / warmup: a rate of 0 would waste the first step.
            return (step + 1) / self.warmup
        if self.kind == "plateau":
            return 0.5**self.halvings
        if self.kind == "constant":
            return 1.0
        remaining = max(0.0, (self.steps - step) / max(1, self.steps - self.warmup))
        if self.kind == "cosine":
            remaining = (1 - math.cos(math.pi * remaining)) / 2
        return self.end + (1 - self.end) * remaining

    def validated(self, loss: float) -> None:
        """Record a validation loss."""
        if loss < self.best:
            self.best, self.waited, self.idle = loss, 0, 0
            return
        self.idle += 1
        self.waited += 1
        if self.waited >= PATIENCE:
            self.halvings, self.waited = self.halvings + 1, 0

    @property
    def is_over(self) -> bool:
        """Return whether the training should stop early."""
        return self.patience is not None and self.idle >= self.patience
