"""Optimizers: AdamW, LAMB for large batches, or Adadelta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teachonce.support.packages import check_library

if TYPE_CHECKING:  # a command's --help must not wait for torch
    import torch
    from torch import nn

OPTIMIZERS = ("adamw", "lamb", "adadelta")
# As in BERT's optimizer, the code of LAMB's authors, and Zeiler 2012, section 4.1. The default of
# torch's AdamW is 1e-8.
EPSILON = 1e-6
RHO = 0.95  # share of the past in Adadelta's averages (Zeiler 2012, section 4.1)
ADADELTA_LR = 1.0  # the method has no rate of its own


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
