"""What is asked of any student, of one of `KINDS`, another model of transformers, or a module of
your own: its size, its states, its heads.

Shape letters: B batch, S tokens, M and N flat tokens (N all that are present, row by row), D width
of the states, V vocabulary, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model.kinds import KINDS, Kind, Parts, first_state
from teachonce.support.errors import UserError

# Of a CPU, by the count of `bytes_of_text`. Eager attention and float32 take about twice it.
HELD = 2**30
SHARE_HELD = 8  # of the memory of a GPU, one part in so many


@runtime_checkable
class OwnStudent(Protocol):
    """What a module of your own must have to learn from a store: a size, and states of tokens.

    width: D of its states. layers: how many it has. For losses of a vocabulary it has a method
    `logits` as well, which makes logits float [M,V] of states [M,D].
    """

    width: int
    layers: int

    def states(self, ids: Tensor, present: Tensor) -> list[Tensor]:
        """Return the states of tokens, float [B,S,D]: of the embeddings, then of each layer. `ids`
        int64 [B,S] are padded; bool [B,S] tells which are `present`."""


def has_attention(student: PreTrainedModel) -> bool:
    """Tell whether a student has attention maps."""
    return bool(getattr(student.config, "num_attention_heads", 0))


def size_of(student: Any) -> tuple[int, int]:
    """Return the width of a student's states, and how many layers it has.

    Raises UserError for a module that can be no student.
    """
    if isinstance(student, PreTrainedModel):
        return student.config.hidden_size, student.config.num_hidden_layers
    if not isinstance(student, OwnStudent):
        raise UserError(
            f"{type(student).__name__}: cannot be a student: expected a masked LM of transformers,"
            " or a module with width, layers and states(ids, present); see OwnStudent"
        )
    return student.width, student.layers


def reads_types(student: PreTrainedModel) -> bool:
    """Tell whether a student is told which of two texts a token is of."""
    return (getattr(student.config, "type_vocab_size", None) or 0) > 1


def head_of(student: Any) -> str:
    """Return `mlm` of a masked LM and of a module of your own, or the kind of the task that a
    student is for.

    Raises UserError for a model that can be no student: it has no masked-LM head, and no head of a
    task that its kind has.
    """
    if not isinstance(student, PreTrainedModel):
        return "mlm"
    models = _kind(student).models
    own = (head for head, model in models.items() if isinstance(student, model))
    found = next(own, "mlm" if type(student).__name__.endswith("ForMaskedLM") else None)
    if found is None:
        raise UserError(
            f"{type(student).__name__}: cannot be a student: expected a masked LM of transformers"
            f" (AutoModelForMaskedLM), or a classifier or tagger of {', '.join(KINDS)}"
            " (teachonce.prepare makes one)"
        )
    return found


def own_projection(student: Any) -> nn.Module | None:
    """Return the student's own map of states to the width of what its heads read, without the GELU
    behind it; None where the heads read the states."""
    return getattr(student, "projection", None) if isinstance(student, PreTrainedModel) else None


def lm_logits(student: PreTrainedModel, states: Tensor) -> Tensor:
    """Return LM-head logits [M,V] of flat last states [M,D] of a masked LM."""
    return _kind(student).lm(student, states)


def tag_logits(student: Any, states: Tensor, output: nn.Module | None = None) -> Tensor:
    """Return logits [M,C] of flat last states [M,D] of a tagger, by its `classifier` or by another
    `output` in its place."""
    found: Tensor = (output or student.classifier)(_kind(student).tag(student, states))
    return found


def class_logits(
    student: Any, states: Tensor, present: Tensor, output: nn.Module | None = None
) -> Tensor:
    """Return logits [B,C] of a classifier, of the last states [N,D] of all tokens that are
    `present` [B,S]; `output` as for `tag_logits`."""
    pooled = sentence_states(student, states, present)
    found: Tensor = (output or student.classifier)(_kind(student).classify(student, pooled))
    return found


def sentence_states(student: PreTrainedModel, states: Tensor, present: Tensor) -> Tensor:
    """Return the states [B,D] that texts are classified by, of the last states [N,D] of all tokens
    that are `present` [B,S]. They are the first token's, the mean, or of a BiLSTM the largest value
    of each channel."""
    padded = states.new_zeros(*present.shape, states.shape[1])
    padded[present] = states
    return _kind(student).pooled(student, padded, present)


def pooled_tokens(student: PreTrainedModel, ids: Tensor, present: Tensor) -> Tensor:
    """Tell which of the tokens [B,S] a text's vector is pooled of: all that are present; of a
    static student those of the text itself."""
    config = student.config if isinstance(student, PreTrainedModel) else None
    special = getattr(config, "special_ids", None)
    if special is None:
        return present
    return present & ~torch.isin(ids, torch.tensor(special, device=ids.device))


def parts_of(student: PreTrainedModel) -> Parts | None:
    """Return the names of what can be cut for a student out of a teacher of its kind; None for
    nothing."""
    return _kind(student).parts


def _logits_by_forward(student: Any, states: Tensor) -> Tensor:
    """Apply the masked-LM head of any model of transformers: it runs over one token, and reads
    these states in place of the encoder's."""

    def given(_module: Any, _arguments: Any, output: Any) -> Any:
        output["last_hidden_state"] = states.unsqueeze(0)
        return output

    handle = student.base_model.register_forward_hook(given)
    try:
        one = torch.ones(1, 1, dtype=torch.int64, device=states.device)
        logits: Tensor = student(input_ids=one, attention_mask=one).logits[0]
        return logits
    finally:
        handle.remove()


def _no_task(student: Any, *_: Any) -> Any:
    raise UserError(
        f"a student of type {_type_of(student)} learns as a masked LM alone; for a task"
        f" take one of {', '.join(KINDS)} (teachonce.prepare makes it)"
    )


# A student of another type that the caller of `train` has made.
FOREIGN = Kind(
    _no_task, {}, None, lm=_logits_by_forward, tag=_no_task, pooled=_no_task, classify=_no_task
)


def _logits_of_own(student: Any, states: Tensor) -> Tensor:
    if not hasattr(student, "logits"):
        raise UserError(
            f"{type(student).__name__}: has no method logits(states), which losses of a vocabulary"
            " need; add it, or choose losses of states"
        )
    logits: Tensor = student.logits(states)
    return logits


# A module that is no model of transformers.
OWN = Kind(
    _no_task, {}, None, lm=_logits_of_own, tag=_no_task, pooled=first_state, classify=_no_task
)


def _type_of(student: Any) -> str:
    if isinstance(student, PreTrainedModel):
        return str(student.config.model_type)
    return type(student).__name__


def _kind(student: Any) -> Kind:
    if not isinstance(student, PreTrainedModel):
        return OWN
    return KINDS.get(student.config.model_type, FOREIGN)


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
