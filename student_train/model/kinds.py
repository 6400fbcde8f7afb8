"""The kinds of student: one entry of `KINDS` for each says how it is built from its shape and cut
out of a teacher, and how its heads are applied. `settings/shapes.py` reads the shape.

Shape letters: B batch, S tokens, M and N flat tokens (N all that are present, row by row), D width
of the states, V vocabulary, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from store.format.features import TaskSpec
from student_train.bilstm import (
    BiLstmConfig,
    BiLstmForMaskedLM,
    BiLstmForSequenceClassification,
    BiLstmForTokenClassification,
)
from student_train.settings.shapes import DEFAULT_KIND, Shape, parse_student
from student_train.static import StaticConfig, StaticModel
from support.errors import UserError


@dataclass(frozen=True)
class Parts:
    """Says how a kind names the parameters that a teacher of its kind has, too. Names of the
    encoder come without the encoder's own name.

    layers: the prefix of a layer's number.
    layer: the parameters of each layer; a teacher with fewer or more is of another kind.
    positions: the learnt positions; None where they are rotary.
    transform, bias: names in the masked-LM head; `transform` is the prefix of several.
    stacked: how many matrices a parameter holds, one upon the other.
    """

    layers: str
    layer: tuple[str, ...]
    positions: str | None
    transform: str
    bias: str
    stacked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """Says how the models of one kind of student are made and used. `KINDS` names each as `SHAPES`
    and its config do.

    config: the config for a shape, a tokenizer, the most tokens of a text, and what all configs
        have.
    models: the class for no task (`mlm`) and for each kind of task.
    parts: what can be cut out of a teacher of that kind; None for nothing.
    lm: logits [M,V] of states [M,D].
    tag: of states [M,D] what the linear map `classifier`, the last of a task's model, reads.
    pooled: the states [B,D] that texts are classified by, of states [B,S,D] and which of them are
        present [B,S].
    classify: of these what `classifier` reads.
    """

    config: Callable[..., PreTrainedConfig]
    models: Mapping[str, type[PreTrainedModel]]
    parts: Parts | None
    lm: Callable[[Any, Tensor], Tensor]
    tag: Callable[[Any, Tensor], Tensor]
    pooled: Callable[[Any, Tensor, Tensor], Tensor]
    classify: Callable[[Any, Tensor], Tensor]


def _bert(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> BertConfig:
    return BertConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **common,
    )


def _modernbert(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> ModernBertConfig:
    return ModernBertConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=positions,
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        attention_dropout=dropout,
        classifier_dropout=dropout,
        layer_types=["full_attention"] * shape.layers,
        cls_token_id=tokenizer.cls_token_id,
        bos_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **{**common, "global_attn_every_n_layers": 1},  # says the types to transformers 4
    )


def _bilstm(
    shape: Shape,
    tokenizer: Any,
    positions: int,
    dropout: float = 0.0,
    recurrent_dropout: float | None = None,
    **common: Any,
) -> BiLstmConfig:
    return BiLstmConfig(
        embedding_size=shape.embeddings,
        lstm_size=shape.width // 2,
        num_hidden_layers=shape.layers,
        dropout=dropout,
        recurrent_dropout=dropout if recurrent_dropout is None else recurrent_dropout,
        **common,
    )


def _static(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> StaticConfig:
    # What the template of a text puts around it is no piece of it; an unknown word is one.
    special = [i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]
    return StaticConfig(hidden_size=shape.width, special_ids=special, **common)


def _headless(*_: Any) -> Tensor:
    raise AssertionError("a static student has no head, and `check` refuses losses that need one")


def _first(model: Any, states: Tensor, present: Tensor) -> Tensor:
    return states[:, 0]


def _as_configured(model: Any, states: Tensor, present: Tensor) -> Tensor:
    """Follow a ModernBERT's `classifier_pooling`: take the first token, or the mean of all."""
    if model.config.classifier_pooling == "cls":
        return states[:, 0]
    return (states * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)


KINDS: dict[str, Kind] = {
    "bert": Kind(  # Devlin et al. 2019
        _bert,
        {
            "mlm": BertForMaskedLM,
            "classification": BertForSequenceClassification,
            "tagging": BertForTokenClassification,
        },
        parts=Parts(
            "encoder.layer.",
            tuple(
                f"{name}.{what}"
                for name in (
                    "attention.self.query",
                    "attention.self.key",
                    "attention.self.value",
                    "attention.output.dense",
                    "attention.output.LayerNorm",
                    "intermediate.dense",
                    "output.dense",
                    "output.LayerNorm",
                )
                for what in ("weight", "bias")
            ),
            "embeddings.position_embeddings.weight",
            "cls.predictions.transform.",
            "cls.predictions.bias",
        ),
        lm=lambda model, states: model.cls(states),
        tag=lambda model, states: model.dropout(states),
        pooled=_first,
        classify=lambda model, pooled: model.dropout(model.bert.pooler(pooled[:, None])),
    ),
    "modernbert": Kind(  # Warner et al. 2024: rotary positions, normalised before a block
        _modernbert,
        {
            "mlm": ModernBertForMaskedLM,
            "classification": ModernBertForSequenceClassification,
            "tagging": ModernBertForTokenClassification,
        },
        parts=Parts(
            "layers.",
            tuple(
                f"{name}.weight"
                for name in ("attn_norm", "attn.Wqkv", "attn.Wo", "mlp_norm", "mlp.Wi", "mlp.Wo")
            ),
            None,
            "head.",
            "decoder.bias",
            {"attn.Wqkv.weight": 3, "mlp.Wi.weight": 2},
        ),
        lm=lambda model, states: model.decoder(model.head(states)),
        tag=lambda model, states: model.drop(model.head(states)),
        pooled=_as_configured,
        classify=lambda model, pooled: model.drop(model.head(pooled)),
    ),
    "bilstm": Kind(  # Mukherjee & Awadallah 2019 and 2020
        _bilstm,
        {
            "mlm": BiLstmForMaskedLM,
            "classification": BiLstmForSequenceClassification,
            "tagging": BiLstmForTokenClassification,
        },
        parts=None,
        lm=lambda model, states: model.logits(states),
        tag=lambda model, states: model.dropout(model.projected(states)),
        pooled=lambda model, states, present: model.pooled(states, present),
        classify=lambda model, pooled: model.dropout(model.projected(pooled)),
    ),
    "static": Kind(
        _static,
        {"mlm": StaticModel},
        parts=None,
        lm=_headless,
        tag=_headless,
        pooled=_headless,
        classify=_headless,
    ),
}


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


def make_student(
    student: str,
    tokenizer: Any,
    positions: int,
    option: str = "--student ",
    default: str = DEFAULT_KIND,
    task: TaskSpec | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Make a model with random weights for the tokenizer's pieces and at most `positions` tokens.

    It is a masked LM, or with a task a classifier or tagger of its labels. A BiLSTM reads texts of
    any length. `settings` go to the `config` of its kind. Raises UserError where `student` is no
    kind and size; see `parse_student`.
    """
    shape = parse_student(student, option, default)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    if task:
        common["id2label"] = dict(enumerate(task.labels))
        common["label2id"] = {label: number for number, label in enumerate(task.labels)}
        if task.later_label is not None:
            common["later_label"] = task.later_label
    kind = KINDS[shape.kind]
    return kind.models[task.kind if task else "mlm"](
        kind.config(shape, tokenizer, positions, **settings, **common)
    )


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
OWN = Kind(_no_task, {}, None, lm=_logits_of_own, tag=_no_task, pooled=_first, classify=_no_task)


def _type_of(student: Any) -> str:
    if isinstance(student, PreTrainedModel):
        return str(student.config.model_type)
    return type(student).__name__


def _kind(student: Any) -> Kind:
    if not isinstance(student, PreTrainedModel):
        return OWN
    return KINDS.get(student.config.model_type, FOREIGN)
