"""The steps from a text's states to its vector, as sentence-transformers has them: pooling, dense
layers, normalising.

They are our own because students are trained through them and dumps run them behind tapped
teachers: neither needs more of that library than these formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from teachonce.support.errors import UserError

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways of pooling, in the order in which the vectors of several are joined."""


class Pooling(nn.Module):
    """Pools states [B,L,D] of B texts to vectors [B, D * number of modes].

    `modes` are some of MODES. Without `include_prompt` the tokens of the prompt are left out.
    """

    def __init__(self, width: int, modes: Sequence[str], include_prompt: bool = True) -> None:
        super().__init__()
        self.width, self.include_prompt = width, include_prompt
        self.modes = tuple(mode for mode in MODES if mode in modes)

    @property
    def out_width(self) -> int:
        return self.width * len(self.modes)

    def forward(self, states: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Pool where `present` bool [B,L], of the B texts, each with one token at least."""
        return torch.cat([_pooled(mode, states, present) for mode in self.modes], dim=-1)


def _pooled(mode: str, states: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Pool states [B,L,D] to [B,D] by one of MODES."""
    places = torch.arange(present.shape[1], device=present.device)
    if mode in ("cls", "lasttoken"):
        if mode == "cls":
            chosen = present.int().argmax(dim=1)
        else:
            chosen = torch.where(present, places, -1).max(dim=1).values
        return states[torch.arange(len(states), device=states.device), chosen]
    if mode == "max":
        return states.masked_fill(~present[..., None], -torch.inf).max(dim=1).values
    weights = present.to(states.dtype)
    if mode == "weightedmean":  # by the place of a token, counted from 1 (Muennighoff 2022)
        weights = weights * (places + 1)
    total = weights.sum(dim=1, keepdim=True)
    if mode == "mean_sqrt_len_tokens":
        total = total.sqrt()
    return (states * weights[..., None]).sum(dim=1) / total.clamp(min=1e-9)


class Dense(nn.Module):
    """A linear layer over vectors [B,W] and an activation; `residual` adds the vector to it."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        bias: bool = True,
        activation: str = "Identity",
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_width, out_width, bias=bias)
        self.activation = activation_of(activation)
        self.adds = residual
        if residual and in_width != out_width:
            self.residual = nn.Linear(in_width, out_width, bias=False)

    @property
    def out_width(self) -> int:
        return self.linear.out_features

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.activation(self.linear(vectors))
        if not self.adds:
            return found
        return found + (self.residual(vectors) if hasattr(self, "residual") else vectors)


def activation_of(name: str) -> nn.Module:
    """Make the activation that torch has under a name, such as `Tanh`. Raises UserError."""
    kind = getattr(nn.modules.activation, name, None) or getattr(nn, name, None)
    known = ("torch.nn.modules.activation", "torch.nn.modules.linear")
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ in known:
        try:
            made: nn.Module = kind()
            return made
        except TypeError:
            pass
    raise UserError(
        f"unknown activation {name!r}: expected one of torch.nn without arguments, such as Tanh,"
        " GELU or Identity"
    )


class Normalize(nn.Module):
    """Scales vectors [B,W] to length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1)


class VectorHead(nn.Module):
    """The steps from states to vectors: a pooling, then any dense layers and normalising."""

    def __init__(self, pooling: Pooling, *steps: nn.Module) -> None:
        super().__init__()
        self.pooling, self.steps = pooling, nn.Sequential(*steps)

    def forward(self, states: torch.Tensor, present: torch.Tensor, prompt: int = 0) -> torch.Tensor:
        """Compute vectors float32 [B,W] of states [B,L,D].

        `present` bool [B,L] is False on padding. The first `prompt` tokens of each text are those
        of a prompt, which some poolings leave out.
        """
        if prompt and not self.pooling.include_prompt:
            present = present & (present.cumsum(dim=1) > prompt)
        vectors: torch.Tensor = self.steps(self.pooling(states.float(), present))
        return vectors

    @property
    def width(self) -> int:
        """W of the vectors."""
        widths = [s.out_width for s in (self.pooling, *self.steps) if not isinstance(s, Normalize)]
        return int(widths[-1])

    @property
    def normalised(self) -> bool:
        """Whether the vectors have length 1."""
        return len(self.steps) > 0 and isinstance(self.steps[-1], Normalize)

    @property
    def description(self) -> str:
        """The steps for people, such as `mean, dense 256 Tanh`."""
        words = ["+".join(self.pooling.modes)]
        for step in self.steps:
            if isinstance(step, Dense):
                words.append(f"dense {step.out_width} {type(step.activation).__name__}")
        return ", ".join(words)


def plain_head(width: int, mode: str, normalise: bool) -> VectorHead:
    """Make the steps of a checkpoint that has none of its own: a pooling, perhaps normalising."""
    steps: list[Any] = [Normalize()] if normalise else []
    return VectorHead(Pooling(width, (mode,)), *steps)
