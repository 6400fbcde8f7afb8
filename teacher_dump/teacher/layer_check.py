"""Checks a teacher on short texts before a dump: the states of its layers must equal transformers'
hidden_states, and padding must not change the output for a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.teacher_dump.teacher.taps import Accumulator, tapped

LENGTH = 130  # tokens of a text: more than a window or chunk of sparse attention, which may pad
PROBE = 16  # tokens of the text on which a head is compared with its decoder
CLOSE = 1e-4  # tolerance relative to the largest value; both sides are of one forward pass
# Tolerances relative to the norm of a token's or text's vector. Rounding depends on the shape of a
# batch: up to 1e-5 in float32, and some per cent in 24 layers of bfloat16.
ALIKE, ALIKE_NARROW = 1e-3, 0.1


@torch.inference_mode()
def check_layers(
    name: str, base: Any, layers: int, limit: int | None, maps: bool, arguments: Mapping[str, Any]
) -> None:
    """Compare each layer's states [2,L,D], and its attention `maps` [2,L,L] if requested, with the
    output of transformers for two short texts.

    name: the checkpoint, for messages. limit: the longest input in tokens. arguments: keyword
    arguments of the forward pass. Raises UserError if states or maps differ, or if `base` cannot
    read such texts.
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
            f"{kind} has no list (ModuleList) of its {layers} layers that run in sequence; use"
            " --hidden none --attention none, or choose a BERT-like encoder"
        )
    width = int(base.config.hidden_size)
    if any(state.shape != (2, length, width) for state in states.sums.values()):
        raise UserError(
            f"{kind} has layers whose outputs do not have hidden_size {width}; choose a BERT-like"
            " encoder, or use --hidden none --attention none"
        )
    if maps and len(attention.sums) < layers:
        raise UserError(f"{kind} returns no attention maps from its layers: use --attention none")
    # The last state is the output itself.
    _compare(kind, "states", [*states.sums.values()][:-1], output.get("hidden_states"))
    expected = output.get("attentions") if maps else None
    averaged = [layer.mean(dim=1, dtype=torch.float32) for layer in expected or ()]
    _compare(kind, "attention maps", [*attention.sums.values()], averaged)


def padding_changes_numbers(teacher: Any) -> bool:
    """Return whether padding changes the states, maps, head inputs or vectors of a text: whether
    its output in a batch with a longer text differs from its output alone.

    Raises UserError if the model cannot read such texts.
    """
    length = min(LENGTH, teacher.max_length() or LENGTH)
    short, pad = max(1, length // 2), teacher.tokenizer.pad_token_id or 0
    ids = np.arange(2 * length).reshape(2, length) % teacher.vocabulary
    # RoBERTa counts positions by ids that are not padding, so the texts themselves have none.
    ids[ids == pad] = (pad + 1) % teacher.vocabulary
    alone, present = ids[1:, :short], np.ones(ids.shape, bool)
    ids[1, short:], present[1, short:] = pad, False
    with _refusing(f"{teacher.name}: {type(teacher.base).__name__}", length):
        padded, single = teacher.run(ids, present), teacher.run(alone, present[1:, :short])
    tolerance = ALIKE_NARROW if teacher.narrow else ALIKE
    outputs, expected = padded.tensors(), single.tensors()
    for name, solo in expected.items():
        output = outputs[name][1]
        for axis, size in enumerate(solo.shape[1:]):
            output = output.narrow(axis, 0, size)
        error = (output.float() - solo[0].float()).norm(dim=-1)
        if (error > tolerance * solo[0].float().norm(dim=-1)).any():  # false for NaN: see `forward`
            return True
    return False


@torch.inference_mode()
def reads_ahead(teacher: Any) -> bool:
    """Return whether the output for a token depends on later tokens. A causal head then does not
    predict the next token. Raises UserError as `padding_changes_numbers` does."""
    length = min(LENGTH, teacher.max_length() or LENGTH)
    ids = np.arange(length)[None] % teacher.vocabulary
    other, present = ids.copy(), np.ones(ids.shape, bool)
    other[0, -1] = (other[0, -1] + 1) % teacher.vocabulary
    with _refusing(f"{teacher.name}: {type(teacher.base).__name__}", length):
        base, changed = (teacher.run(x, present).head_input[0, :-1].float() for x in (ids, other))
    tolerance = ALIKE_NARROW if teacher.narrow else ALIKE
    return bool(((base - changed).norm(dim=-1) > tolerance * base.norm(dim=-1)).any())


@torch.inference_mode()
def head_outputs(name: str, network: Any, limit: int) -> torch.Tensor:
    """Return what a network's head computes for a short text, float32: logits, or the input of the
    decoder if it was split off.

    limit: the longest input in tokens. Raises UserError as `check_layers` does.
    """
    length = min(PROBE, limit)
    pieces, device = int(network.config.vocab_size), next(network.parameters()).device
    ids = torch.arange(length, device=device)[None] % pieces
    cache = {"use_cache": False} if getattr(network.config, "use_cache", False) else {}
    with _refusing(f"{name}: {type(network).__name__}", length):
        output = network(input_ids=ids, attention_mask=torch.ones_like(ids), **cache)
    logits: torch.Tensor = output.logits
    return logits.flatten(0, -2).float()


@contextmanager
def _refusing(kind: str, length: int) -> Iterator[None]:
    """Raise any error of the forward pass inside the `with` block as UserError, which names the
    `kind` of model."""
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


def _compare(kind: str, name: str, outputs: Sequence[Any], expected: Sequence[Any] | None) -> None:
    for number, (output, reference) in enumerate(zip(outputs, expected or (), strict=False)):
        same = output.shape == reference.shape
        if not same or (output - reference).abs().max() > CLOSE * reference.abs().max():
            flag = "--hidden" if name == "states" else "--attention"
            raise UserError(
                f"{kind}: the {name} of layer {number} differ from the output of transformers;"
                f" use {flag} none, or choose a BERT-like encoder"
            )
