"""One interface for every student: a model of `KINDS`, another transformers model, or your own
module. It gives the student's size, states and heads.

Shape letters: B batch, S tokens, M chosen flat tokens, N all present tokens (flat, row by row), D
hidden size, V vocabulary, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from teachonce.checkpoints.declared import longest_input
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model.kinds import KINDS, ModelKind, first_state
from teachonce.support.errors import UserError
from teachonce.training.ranks import ALONE, Ranks

# Activations of one forward pass on a CPU, counted by `bytes_of_text`. The true number is about
# twice as large with eager attention and float32.
# With this budget 64 texts of 512 tokens take 2.3 GB instead of 5.6 GB (ModernBERT `tiny`), and
# 1.27 times as long.
CPU_BUDGET = 2**30
GPU_SHARE = 8  # on a GPU, an eighth of its memory


@runtime_checkable
class OwnStudent(Protocol):
    """Defines the interface of your own student module.

    width: the hidden size D. layers: the number of layers. Losses on vocabulary logits also require
    a method `logits`, from states [M,D] to logits float [M,V].
    """

    width: int
    layers: int

    def states(self, ids: Tensor, present: Tensor) -> list[Tensor]:
        """Return hidden states float [B,S,D] of the embeddings and of each layer, in this order.

        ids: padded, int64 [B,S]. present: the attention mask, bool [B,S].
        """


def has_attention(student: PreTrainedModel) -> bool:
    return bool(getattr(student.config, "num_attention_heads", 0))


def student_size(student: Any) -> tuple[int, int]:
    """Return a student's hidden size and number of layers.

    Raises UserError for a module that cannot be a student.
    """
    if isinstance(student, PreTrainedModel):
        return student.config.hidden_size, student.config.num_hidden_layers
    if not isinstance(student, OwnStudent):
        raise UserError(
            f"{type(student).__name__}: cannot be a student: expected a masked LM of transformers,"
            " or a module with width, layers and states(ids, present); see OwnStudent"
        )
    return student.width, student.layers


def check_fits(student: Any, pieces: int, length: int) -> None:
    """Raise UserError if a model has fewer pieces or positions than its batches may have. PyTorch's
    own error, an index out of range, names neither."""
    if not isinstance(student, PreTrainedModel):
        return
    config = student.config
    # Rotary and relative positions have no table, and no limit.
    tables = (
        module.num_embeddings
        for name, module in student.named_modules()
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding)
    )
    positions = longest_input(None, next(tables, None), config.to_dict())
    for has, needed, field, change in (
        (
            getattr(config, "vocab_size", pieces),
            pieces,
            "vocab_size",
            "give the tokenizer of this model as the vocab",
        ),
        (positions or length, length, "max_position_embeddings", "set max_length"),
    ):
        if has < needed:
            noun = "pieces" if field == "vocab_size" else "tokens"
            raise UserError(
                f"{type(student).__name__}: has room for {has:,} {noun}, and the batches have up to"
                f" {needed:,}; make it with a larger {field}, or {change}"
            )


def reads_types(student: PreTrainedModel) -> bool:
    """Return whether a student has token type embeddings for the two texts of a pair."""
    return (getattr(student.config, "type_vocab_size", None) or 0) > 1


def head_of(student: Any) -> str:
    """Return a student's kind of head: `mlm` (also for your own module), or a kind of task.

    Raises UserError for a model that has neither a masked-LM head nor a task head of `KINDS`.
    """
    if not isinstance(student, PreTrainedModel):
        return "mlm"
    for head, model in kind_of(student).models.items():
        if isinstance(student, model):
            return head
    name = type(student).__name__
    for end, head in (("ForMaskedLM", "mlm"), ("ForCausalLM", "causal")):
        if name.endswith(end):
            return head
    raise UserError(
        f"{name}: cannot be a student: expected a masked LM of transformers (AutoModelForMaskedLM),"
        f" a decoder, or a classifier or tagger of {', '.join(KINDS)} (teachonce.prepare makes one)"
    )


def own_projection(student: Any) -> nn.Module | None:
    """Return the projection between a student's states and its heads, without its GELU; None if the
    heads read the states directly."""
    return getattr(student, "projection", None) if isinstance(student, PreTrainedModel) else None


def tag_logits(student: Any, states: Tensor, output: nn.Module | None = None) -> Tensor:
    """Return the logits [M,C] of a tagger's head for flat last states [M,D]. `output` replaces the
    last linear layer, `classifier`."""
    logits: Tensor = (output or student.classifier)(kind_of(student).tag(student, states))
    return logits


def class_logits(
    student: Any, states: Tensor, present: Tensor, output: nn.Module | None = None
) -> Tensor:
    """Return the logits [B,C] of a classifier's head for the last states [N,D] of all `present`
    [B,S] tokens. `output` replaces the last linear layer, `classifier`."""
    pooled = sentence_states(student, states, present)
    logits: Tensor = (output or student.classifier)(kind_of(student).classify(student, pooled))
    return logits


def sentence_states(student: PreTrainedModel, states: Tensor, present: Tensor) -> Tensor:
    """Pool the last states [N,D] of all `present` [B,S] tokens into the classifier's input [B,D].

    The kind of student determines the pooling: the first token's state, the mean, or, for a BiLSTM,
    the max of each channel or the last states.
    """
    padded = states.new_zeros(*present.shape, states.shape[1])
    padded[present] = states
    return kind_of(student).pooled(student, padded, present)


def pooled_tokens(student: PreTrainedModel, ids: Tensor, present: Tensor) -> Tensor:
    """Return the tokens [B,S] that are pooled into a text's vector: all present ones, without
    special tokens if the student is static."""
    config = student.config if isinstance(student, PreTrainedModel) else None
    special = getattr(config, "special_ids", None)
    if special is None:
        return present
    return present & ~torch.isin(ids, torch.tensor(special, device=ids.device))


def _logits_by_forward(student: Any, states: Tensor) -> Tensor:
    """Apply the masked-LM head of any transformers model to flat states [M,D]."""

    # Heads have no common interface. So the model runs over a single token, and a hook replaces the
    # encoder's output by the given states.
    def replace_states(_module: Any, _arguments: Any, output: Any) -> Any:
        output["last_hidden_state"] = states.unsqueeze(0)
        return output

    handle = student.base_model.register_forward_hook(replace_states)
    try:
        one = torch.ones(1, 1, dtype=torch.int64, device=states.device)
        logits: Tensor = student(input_ids=one, attention_mask=one).logits[0]
        return logits
    finally:
        handle.remove()


def _no_task(student: Any, *_: Any) -> Any:
    is_module = not isinstance(student, PreTrainedModel)
    kind = type(student).__name__ if is_module else student.config.model_type
    raise UserError(
        f"a student of type {kind} can be trained as a masked LM only; for a task"
        f" make one of {', '.join(KINDS)} with teachonce.prepare"
    )


# A transformers model of another type, made by the caller of `train`.
FOREIGN = ModelKind(
    _no_task, {}, lm=_logits_by_forward, tag=_no_task, pooled=_no_task, classify=_no_task
)


def _logits_of_own(student: Any, states: Tensor) -> Tensor:
    if not hasattr(student, "logits"):
        raise UserError(
            f"{type(student).__name__}: has no method logits(states), which losses on vocabulary"
            " logits need; add it, or choose losses on hidden states"
        )
    logits: Tensor = student.logits(states)
    return logits


# Your own module.
OWN = replace(FOREIGN, lm=_logits_of_own, pooled=first_state)


def kind_of(student: Any) -> ModelKind:
    """Return the entry of `KINDS` of a student; `FOREIGN` or `OWN` for a model of another kind."""
    if not isinstance(student, PreTrainedModel):
        return OWN
    return KINDS.get(student.config.model_type, FOREIGN)


@dataclass(frozen=True)
class Outputs:
    """Holds the outputs of one forward pass: flat states [N,D] by layer (0 is the embeddings) and
    attention maps [B,S,S] by layer, averaged over heads."""

    states: list[Tensor]
    maps: list[Tensor]
    present: Tensor  # bool [B,S]

    @property
    def last(self) -> Tensor:
        """Return the states [N,D] of the last layer."""
        return self.states[-1]


def forward_pass(student: Any, inputs: Inputs, maps: bool = False) -> Outputs:
    """Run a student over a batch, with attention maps if `maps` is true.

    If the activations exceed the budget of the device, the batch is split by texts and its
    activations are recomputed in the backward pass (gradient checkpointing, Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). Raises UserError for maps of your own module.
    """
    # Outputs and gradients are the same as without splitting; the cost is a second forward pass.
    device, length = inputs.ids.device, inputs.ids.shape[1]
    budget = CPU_BUDGET
    if device.type == "cuda":
        budget = torch.cuda.get_device_properties(device).total_memory // GPU_SHARE
    parts = inputs.split(max(1, budget // bytes_of_text(student, length)))
    if len(parts) == 1:
        return _run(student, inputs, maps)
    # The reentrant way needs an input with a gradient, and ids have none. The state of the random
    # numbers is preserved (by default): the second pass must draw the same dropout.
    outputs = [checkpoint(_run, student, part, maps, use_reentrant=False) for part in parts]
    return Outputs(
        [torch.cat(layer) for layer in zip(*(part.states for part in outputs), strict=True)],
        [torch.cat(layer) for layer in zip(*(part.maps for part in outputs), strict=True)],
        inputs.present,
    )


def shared_pass(student: Any, inputs: Inputs, maps: bool, ranks: Ranks = ALONE) -> Outputs:
    """Run a student over a batch as `forward_pass` does; each process runs over its share of the
    texts, and gets the outputs of all texts. Without gradients a process runs alone."""
    if ranks.size == 1 or not torch.is_grad_enabled():
        return forward_pass(student, inputs, maps)
    rank, (share, extra) = ranks.rank, divmod(len(inputs.ids), ranks.size)
    texts = [share + (r < extra) for r in range(ranks.size)]
    parts = inputs.split(texts)
    tokens = [int(part.present.sum()) for part in parts]
    device = inputs.ids.device
    seed = int(torch.randint(2**31, ()))  # the same in all processes, different in each pass
    # The generator is forked, so that its state stays the same in all processes.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + rank)  # else all shares have the same dropout
        # A process without texts runs over the first process's texts, because its outputs need
        # shapes and gradients. None of its rows are gathered.
        outputs = forward_pass(student, parts[rank if texts[rank] else 0], maps)

    def gathered(values: list[Tensor], rows: list[int]) -> list[Tensor]:
        begin, end = sum(rows[:rank]), rows[rank]
        return [ranks.gather(tensor[:end], begin, sum(rows)) for tensor in values]

    return Outputs(gathered(outputs.states, tokens), gathered(outputs.maps, texts), inputs.present)


def bytes_of_text(student: Any, length: int) -> int:
    """Estimate the size in bytes, at least 1, of the 16-bit activations that a text of `length`
    tokens leaves for the backward pass.

    s h L (34 + 5 a s / h), Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), equation 1;
    the term in a is 0 for fused attention.
    """
    width, layers = student_size(student)
    eager = getattr(getattr(student, "config", None), "_attn_implementation", None) == "eager"
    heads = student.config.num_attention_heads if eager and has_attention(student) else 0
    return max(1, length * layers * (34 * width + 5 * heads * length))


def _run(student: Any, inputs: Inputs, maps: bool) -> Outputs:
    if not isinstance(student, PreTrainedModel):
        if maps:
            raise UserError(
                f"{type(student).__name__}: your own module has no attention maps; choose other"
                " losses"
            )
        states = student.states(inputs.ids, inputs.present)
        return Outputs([state[inputs.present] for state in states], [], inputs.present)
    types = inputs.types if reads_types(student) else None
    output = student.base_model(
        input_ids=inputs.ids,
        attention_mask=inputs.present.long(),
        output_hidden_states=True,
        output_attentions=maps,
        # A training generates no token: the cache of keys and values would only take memory.
        **({"use_cache": False} if "causal" in kind_of(student).models else {}),
        **({} if types is None else {"token_type_ids": types}),
    )
    states = [state[inputs.present] for state in output.hidden_states]
    averaged = [m.mean(dim=1) for m in output.attentions] if maps else []
    return Outputs(states, averaged, inputs.present)
