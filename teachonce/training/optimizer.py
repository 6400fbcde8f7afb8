"""Optimizers: AdamW, LAMB for large batches, or Adadelta. Learning-rate schedules: warm-up, then
linear or cosine decay, or halving on a plateau of the validation loss. Early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teachonce.support.packages import check_library

if TYPE_CHECKING:
    import torch
    from torch import nn

OPTIMIZERS = ("adamw", "lamb", "adadelta")
# As in BERT's optimizer, the code of LAMB's authors, and Zeiler 2012, section 4.1. The default of
# torch's AdamW is 1e-8.
EPSILON = 1e-6
RHO = 0.95  # share of the past in Adadelta's averages (Zeiler 2012, section 4.1)
ADADELTA_LR = 1.0  # the method has no rate of its own

SCHEDULES = ("linear", "cosine", "plateau", "constant")
ENDLESS = ("plateau", "constant")  # do not decay to a last rate, so they have no `end`
# As in Kolesnikova et al. 2022, appendix B; their code waits longer after a halving.
PATIENCE = 3


def check_optimizer(name: str) -> None:
    """Raise UserError if the package of an optimizer (a name in `OPTIMIZERS`) is not installed."""
    if name == "lamb":
        check_library("pytorch_optimizer", "lamb", "--optimizer lamb")


def optimizer_of(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer called `name` over the trainable parameters of a model.

    Weight decay does not apply to biases and norms. LAMB (You et al. 2020,
    https://arxiv.org/abs/1904.00962, algorithm 2): the step of a matrix is scaled to the matrix's
    own norm, at most 10, times the learning rate; biases and norms take Adam's step, as in its
    authors' code. Adadelta (Zeiler 2012, https://arxiv.org/abs/1212.5701, algorithm 1) has no
    `betas`; weight decay is added to its gradient. `fused` affects only AdamW.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trainable if p.dim() > 1], "weight_decay": weight_decay}
    vectors = {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0}
    import torch

    if name == "adadelta":
        return torch.optim.Adadelta([matrices, vectors], lr=lr, rho=RHO, eps=EPSILON)
    if name == "adamw":
        # `or None`: False would also rule out `foreach`, which torch chooses by itself on a GPU.
        return torch.optim.AdamW(
            [matrices, vectors], lr=lr, betas=betas, eps=EPSILON, fused=fused or None
        )
    from pytorch_optimizer import Lamb  # an extra, and slow to import

    # By default the package decays weights apart from the step, and its first steps are up to ten
    # times longer.
    return Lamb(
        [matrices, {**vectors, "adam": True}],
        lr=lr,
        betas=betas,
        eps=EPSILON,
        weight_decouple=False,
        adam_debias=True,
    )


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
