"""The student's forward pass over a batch, which is read in parts where memory could not hold what
the whole of it leaves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model.any_student import has_attention, reads_types, size_of
from teachonce.support.errors import UserError

# Of a CPU, by the count of `bytes_of_text`. Eager attention and float32 take about twice it.
HELD = 2**30
SHARE_HELD = 8  # of the memory of a GPU, one part in so many


@dataclass(frozen=True)
class Outputs:
    """Holds what one forward pass gives: flat states [N,D] by layer (0 is the embeddings) and
    attention maps [B,S,S] by layer, averaged over heads."""

    states: list[Tensor]
    maps: list[Tensor]
    present: Tensor  # bool [B,S]

    @property
    def last(self) -> Tensor:
        """Return states [N,D] of the last layer."""
        return self.states[-1]


def forward_pass(student: Any, inputs: Inputs, maps: bool = False) -> Outputs:
    """Run a student over a batch; give attention maps only where asked for.

    A batch whose activations are more than may be held is read in parts of whole texts. Of a part
    only its outputs are kept; the backward pass computes its activations anew (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). Outputs and gradients are those of the whole batch, for the
    price of a second forward pass. Raises UserError where a module of your own is asked for maps.
    """
    texts, length = inputs.ids.shape
    parts = inputs.split(max(1, held_on(inputs.ids.device) // bytes_of_text(student, length)))
    if len(parts) == 1:
        return _read(student, inputs, maps)
    found = [checkpoint(_read, student, part, maps, use_reentrant=False) for part in parts]
    return Outputs(
        [torch.cat(layer) for layer in zip(*(part.states for part in found), strict=True)],
        [torch.cat(layer) for layer in zip(*(part.maps for part in found), strict=True)],
        inputs.present,
    )


def held_on(device: torch.device) -> int:
    """Count the bytes of activations that a forward pass may leave on a device."""
    if device.type != "cuda":
        return HELD
    return torch.cuda.get_device_properties(device).total_memory // SHARE_HELD


def bytes_of_text(student: Any, length: int) -> int:
    """Count the bytes of activations that a text of `length` tokens leaves for the backward pass,
    in 16 bits: s h L (34 + 5 a s / h), by Korthikanti et al. 2022
    (https://arxiv.org/abs/2205.05198), equation 1; fused attention leaves no term in a. At least
    1."""
    width, layers = size_of(student)
    eager = getattr(getattr(student, "config", None), "_attn_implementation", None) == "eager"
    heads = student.config.num_attention_heads if eager and has_attention(student) else 0
    return max(1, length * layers * (34 * width + 5 * heads * length))


def _read(student: Any, inputs: Inputs, maps: bool) -> Outputs:
    if not isinstance(student, PreTrainedModel):
        return _read_own(student, inputs, maps)
    types = inputs.types if reads_types(student) else None
    output = student.base_model(
        input_ids=inputs.ids,
        attention_mask=inputs.present.long(),
        output_hidden_states=True,
        output_attentions=maps,
        **({} if types is None else {"token_type_ids": types}),
    )
    states = [state[inputs.present] for state in output.hidden_states]
    averaged = [m.mean(dim=1) for m in output.attentions] if maps else []
    return Outputs(states, averaged, inputs.present)


def _read_own(student: Any, inputs: Inputs, maps: bool) -> Outputs:
    if maps:
        raise UserError(
            f"{type(student).__name__}: a module of your own gives no attention maps; choose other"
            " losses"
        )
    states = student.states(inputs.ids, inputs.present)
    return Outputs([state[inputs.present] for state in states], [], inputs.present)
