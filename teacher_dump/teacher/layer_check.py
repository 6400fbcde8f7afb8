"""Compares what is taken from a teacher's layers with what transformers gives, before a dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.teacher_dump.teacher.taps import Accumulator, tapped

LENGTH = 130  # tokens of a text: more than the windows and chunks of sparse attention, if they pad
CLOSE = 1e-4  # of the largest value; both sides are of one forward pass


@torch.inference_mode()
def check_layers(
    name: str, base: Any, layers: int, limit: int | None, maps: bool, arguments: Mapping[str, Any]
) -> None:
    """Run an encoder over two short texts of random pieces and compare each layer's states [2,L,D],
    and if requested `maps` [2,L,L], with those that transformers itself gives.

    name: of the checkpoint. limit: tokens of its longest input. arguments: of its forward pass.
    Raises UserError if they differ, or if the encoder cannot read such texts.
    """
    length = min(LENGTH, limit or LENGTH)
    states = Accumulator({str(n): [n] for n in range(layers + 1)})
    attention = Accumulator({str(n): [n] for n in range(1, layers + 1) if maps})
    device, pieces = next(base.parameters()).device, int(base.config.vocab_size)
    ids = torch.arange(2 * length, device=device).reshape(2, length) % pieces
    present = torch.ones_like(ids)
    present[1, length // 2 :] = 0
    kind = f"{name}: {type(base).__name__}"
    try:
        with tapped(base, layers, length, states, attention):
            output = base(
                input_ids=ids, attention_mask=present, output_hidden_states=True, **arguments
            )
    except Exception as error:  # models raise errors of any kind for lengths that they cannot read
        if out_of_memory(error) or isinstance(error, UserError):
            raise
        raise UserError(
            f"{kind} cannot read a batch of texts of {length} tokens ({first_line(error)}); choose"
            " a BERT-like encoder"
        ) from error
    if len(states.sums) <= layers:
        raise UserError(
            f"{kind} has no list of its {layers} layers that run one after another; use --hidden"
            " none --attention none, or choose a BERT-like encoder"
        )
    width = int(base.config.hidden_size)
    if any(each.shape != (2, length, width) for each in states.sums.values()):
        raise UserError(
            f"{kind} has layers of other widths than hidden_size {width}; choose a BERT-like"
            " encoder, or use --hidden none --attention none"
        )
    if maps and len(attention.sums) < layers:
        raise UserError(f"{kind} gives no attention maps in its layers: use --attention none")
    # The last state is the output itself.
    _compare(kind, "states", [*states.sums.values()][:-1], output.get("hidden_states"))
    theirs = output.get("attentions") if maps else None
    averaged = None if theirs is None else [each.mean(dim=1) for each in theirs]
    _compare(kind, "attention maps", [*attention.sums.values()], averaged)


def _compare(kind: str, what: str, own: Sequence[Any], theirs: Sequence[Any] | None) -> None:
    for number, (ours, wanted) in enumerate(zip(own, theirs or (), strict=False)):
        same = ours.shape == wanted.shape
        if not same or (ours - wanted).abs().max() > CLOSE * wanted.abs().max():
            flag = "--hidden" if what == "states" else "--attention"
            raise UserError(
                f"{kind}: the {what} of layer {number} are not what transformers gives for it;"
                f" use {flag} none, or choose a BERT-like encoder"
            )
