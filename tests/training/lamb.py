"""LAMB as in its paper, in numpy (You et al. 2020, algorithm 2, without Adam's bias correction)."""

from typing import Any

import numpy as np
import torch

from teachonce.support.arrays import Array

EPSILON, LONGEST = 1e-6, 10.0


def lamb(
    weights: Array,
    gradients: list[Array],
    rates: list[float],
    betas: tuple[float, float],
    decay: float,
) -> Array:
    """Return the weights after a step with each gradient. Vectors have no decay and no scaling."""
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for gradient, rate in zip(gradients, rates, strict=True):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        update = first / (np.sqrt(second) + EPSILON)
        if weights.ndim > 1:
            update = update + decay * weights
            norm = min(float(np.linalg.norm(weights)), LONGEST)
            update = update * norm / np.linalg.norm(update)
        weights = weights - rate * update
    return weights


def check_steps(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """Take three steps with random gradients; check each parameter against `lamb`."""
    draw, rates = np.random.default_rng(5), [1e-2, 2e-2, 5e-3]
    starts = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    gradients = {n: [draw.normal(size=p.shape) for _ in rates] for n, p in starts.items()}
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.from_numpy(gradients[name][step]).float()
        optimizer.step()
    for name, parameter in model.named_parameters():
        wanted: Any = starts[name]
        if parameter.requires_grad:
            wanted = lamb(wanted, gradients[name], rates, betas, decay)
        np.testing.assert_allclose(
            parameter.detach().numpy(), wanted, rtol=2e-5, atol=1e-6, err_msg=name
        )
