"""Averages states and attention maps of a network's layers with hooks, during the forward pass."""

# Averaging during the pass needs memory for one tensor per group; `output_hidden_states` would hold
# the states of every layer at once.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from teachonce.support.errors import UserError


def find_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """Find the transformer layers of an encoder: its outermost ModuleList of `count` modules.

    Raises UserError if the encoder has no such list.
    """
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(base).__name__} has no list (ModuleList) of its {count} layers (they may share"
        " weights): choose a BERT-like encoder"
    )


class Accumulator:
    """Computes running means of tensors over named groups of layers."""

    def __init__(self, groups: Mapping[str, list[int]]) -> None:
        self.groups = groups
        self.sums: dict[str, torch.Tensor] = {}
        self.added = Counter[tuple[str, int]]()

    def add(self, layer: int, value: torch.Tensor) -> None:
        for name, members in self.groups.items():
            if layer in members:
                self.added[name, layer] += 1
                if name not in self.sums:
                    self.sums[name] = torch.zeros_like(value, dtype=torch.float32)
                self.sums[name].add_(value, alpha=1 / len(members))

    def take(self) -> dict[str, torch.Tensor]:
        """Return the means, and reset them."""
        sums, self.sums = self.sums, {}
        self.added.clear()
        return sums

    def check(self) -> None:
        """Raise UserError unless each layer was added exactly once."""
        for name, members in self.groups.items():
            for layer in members:
                if (count := self.added[name, layer]) != 1:
                    raise UserError(
                        f"layer {layer} of the teacher ran {count} times in one forward pass,"
                        f" expected once, so {name} cannot be computed: use --hidden none and"
                        " --attention none"
                    )


@contextmanager
def tapped(
    base: nn.Module, layers: int, length: int, hidden: Accumulator, attention: Accumulator
) -> Iterator[None]:
    """Add, inside the `with` block, hidden states [B,L,D] and attention maps [B,L,L] of each
    forward pass of `base` to the accumulators. `length` is L.

    State i is the input of layer i + 1; state `layers` is the output of `base`, and state
    `layers + 1` the output of the last layer, before a final norm. Attention maps are
    probabilities, averaged over heads. Raises UserError if a layer reads fewer tokens than the
    input has, or if maps have another shape.
    """
    # Inputs, not outputs: so final norms and convolutions between layers are part of the states, as
    # in transformers' `hidden_states`. Longformer's layers pad their input at the end; the hooks
    # leave out the states of that padding.
    handles = []
    modules = find_layers(base, layers)
    for i, layer in enumerate(modules):
        hook = _read_state(hidden, i, length)
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if attention.groups:
            handles += _tap_attention(layer, attention, i + 1, length)

    def read_last(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden.add(layers, output[0])

    def read_unnormed(_module: nn.Module, _inputs: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        hidden.add(layers + 1, state[:, :length])

    if any(layers + 1 in members for members in hidden.groups.values()):
        handles.append(modules[-1].register_forward_hook(read_unnormed))
    handles.append(base.register_forward_hook(read_last))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read_state(hidden: Accumulator, number: int, length: int) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Some families pass the states to their layers by keyword.
        state = args[0] if args else kwargs["hidden_states"]
        if state.shape[1] < length:
            raise UserError(
                f"layer {number + 1} has hidden states for {state.shape[1]} positions, expected"
                f" {length}, one for each token: use --hidden none and --attention none, or choose"
                " a BERT-like encoder"
            )
        hidden.add(number, state[:, :length])

    return hook


def _tap_attention(layer: nn.Module, attention: Accumulator, number: int, length: int) -> list[Any]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        maps = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(maps, torch.Tensor) or maps.dim() != 4:
            raise UserError(f"layer {number} returns no attention maps: use --attention none")
        if maps.shape[2:] != (length, length):
            raise UserError(
                f"the attention maps of layer {number} are not tokens x tokens (its attention is"
                " sparse or pooled): use --attention none"
            )
        attention.add(number, maps.mean(dim=1, dtype=torch.float32))

    named = [m for m in layer.modules() if "Attention" in type(m).__name__ and m is not layer]
    # A wrapper of an attention module returns the same maps: only the innermost one counts.
    innermost = [m for m in named if not any(n in named for n in m.modules() if n is not m)]
    return [module.register_forward_hook(hook) for module in innermost]
