"""What moves the weights: AdamW, or LAMB for large batches."""

from __future__ import annotations

import torch
from torch import nn

from student_train.options import TrainOptions

BETAS, EPSILON = (0.9, 0.98), 1e-6  # as DistilBERT was trained (Sanh et al. 2019)


def optimizer_of(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """What `--optimizer` asks for, over the parameters that are not frozen.

    Biases and norms do not decay. LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962,
    algorithm 2) gives the step of a matrix the norm of the matrix, at most 10, times the learning
    rate; biases and norms take Adam's step, as in its authors' code.
    """
    moving = [p for p in model.parameters() if p.requires_grad]
    matrices = {
        "params": [p for p in moving if p.dim() > 1],
        "weight_decay": options.weight_decay,
    }
    others = {"params": [p for p in moving if p.dim() <= 1], "weight_decay": 0.0}
    rate = options.resolved_lr
    if options.optimizer == "adamw":
        return torch.optim.AdamW([matrices, others], lr=rate, betas=BETAS, eps=EPSILON, fused=True)
    from pytorch_optimizer import Lamb  # an extra, and slow to import

    # Its defaults decay apart from the step, and make the first steps up to ten times longer.
    return Lamb(
        [matrices, {**others, "adam": True}],
        lr=rate,
        betas=BETAS,
        eps=EPSILON,
        weight_decouple=False,
        adam_debias=True,
    )
