"""Runs a teacher over short texts before a dump: are its layers those of transformers, and its
numbers those of a text alone?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.teacher_dump.teacher.taps import Accumulator, tapped

LENGTH = 130  # tokens of a text: more than the windows and chunks of sparse attention, if they pad
CLOSE = 1e-4  # of the largest value; both sides are of one forward pass
# Of the norm of one token's, or one text's, numbers. Batches of other shapes are rounded otherwise:
# by up to 1e-5 in float32, and by some per cent in 24 layers of bfloat16.
ALIKE, ALIKE_NARROW = 1e-3, 0.1


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
    with _refusing(kind, length), tapped(base, layers, length, states, attention):
        output = base(input_ids=ids, attention_mask=present, output_hidden_states=True, **arguments)
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
    averaged = [each.mean(dim=1, dtype=torch.float32) for each in theirs or ()]
    _compare(kind, "attention maps", [*attention.sums.values()], averaged)


def padding_changes_numbers(teacher: Any) -> bool:
    """Return whether a `Teacher` gives a text other states, maps, head inputs or vectors next to a
    longer one, by the padding behind it, than alone.

    Raises UserError if the model cannot read such texts.
    """
    length = min(LENGTH, teacher.max_length() or LENGTH)
    short, pad = max(1, length // 2), teacher.tokenizer.pad_token_id or 0
    ids = np.arange(2 * length).reshape(2, length) % teacher.vocabulary
    ids[ids == pad] = (pad + 1) % teacher.vocabulary
    alone, present = ids[1:, :short], np.ones(ids.shape, bool)
    ids[1, short:], present[1, short:] = pad, False
    with _refusing(f"{teacher.name}: {type(teacher.base).__name__}", length):
        padded, single = teacher.run(ids, present), teacher.run(alone, present[1:, :short])
    most = ALIKE_NARROW if teacher.narrow else ALIKE
    there, wanted = padded.tensors(), single.tensors()
    for name, right in wanted.items():
        ours = there[name][1]
        for axis, size in enumerate(right.shape[1:]):
            ours = ours.narrow(axis, 0, size)
        off = (ours.float() - right[0].float()).norm(dim=-1)
        if (off > most * right[0].float().norm(dim=-1)).any():  # false for NaN: see `forward`
            return True
    return False


@contextmanager
def _refusing(kind: str, length: int) -> Iterator[None]:
    """Raise UserError, which names the `kind` of model, for an error of its forward pass."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{kind}: {error}") from error
    except Exception as error:  # models raise errors of any kind for lengths that they cannot read
        if out_of_memory(error):
            raise
        raise UserError(
            f"{kind} cannot read a batch of texts of {length} tokens ({first_line(error)}); choose"
            " a BERT-like encoder"
        ) from error


def _compare(kind: str, what: str, own: Sequence[Any], theirs: Sequence[Any] | None) -> None:
    for number, (ours, wanted) in enumerate(zip(own, theirs or (), strict=False)):
        same = ours.shape == wanted.shape
        if not same or (ours - wanted).abs().max() > CLOSE * wanted.abs().max():
            flag = "--hidden" if what == "states" else "--attention"
            raise UserError(
                f"{kind}: the {what} of layer {number} are not what transformers gives for it;"
                f" use {flag} none, or choose a BERT-like encoder"
            )
