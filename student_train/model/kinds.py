"""The kinds of student: one entry of `KINDS` for each says how it is read from `--student`, built,
trained by default, and cut out of a teacher, and how its heads are applied.

Shape letters: B batch, S tokens, M and N flat tokens (N all that are present, row by row), D width
of the states, V vocabulary, C labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
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
    max_over,
)
from support.errors import UserError

SIZES = {"tiny": (264, 3, 12)}
DEFAULT_KIND = "bert"
GREATEST_RATE, RATE_TIMES_WIDTH = 4e-3, 0.5  # of transformers the best rate falls with the width
RECURRENT_RATE = 3e-3  # of a BiLSTM, at any width


Positions = Literal["learnt", "rotary", "none"]


@dataclass(frozen=True)
class Shape:
    """A kind of student and its sizes: `width` of the states and of the word `embeddings`,
    `layers`, and attention `heads` in each, 0 where there is no attention."""

    kind: str
    width: int
    layers: int
    heads: int
    embeddings: int

    @property
    def positions(self) -> Positions:
        """How the student knows where a token stands."""
        return KINDS[self.kind].positions

    @property
    def learning_rate(self) -> float:
        """The peak learning rate where `--lr` gives none."""
        return KINDS[self.kind].rate(self)


@dataclass(frozen=True)
class Parts:
    """How a kind names those parameters that a teacher of its kind has, too: those of the encoder
    without the encoder's own name.

    layers: what a layer's number stands behind.
    layer: what layers have; a teacher whose layers have less or more is of another kind.
    positions: the learnt positions; None where they are rotary.
    transform, bias: of the masked-LM head, the first the beginning of several names.
    stacked: matrices that are so many, one upon the other.
    """

    layers: str
    layer: tuple[str, ...]
    positions: str | None
    transform: str
    bias: str
    stacked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """All that differs between kinds of student. `KINDS` names each by the `model_type` of its
    config.

    shape: the shape for a kind's name and a size as it is written after `KIND:`. It raises
        ValueError for what is no size: what is wrong, without the option, and perhaps the size that
        was meant.
    config: the config for a shape, a tokenizer, the most tokens of a text, and what all configs
        have.
    models: the class for no task (`mlm`) and for each kind of task.
    positions: whether positions are learnt, rotary, or none of its parts.
    rate: the default of the peak learning rate.
    parts: what can be cut out of a teacher of that kind; None for nothing.
    lm, tag: logits [M,V] and [M,C] of states [M,D].
    pooled: what a text is classified by, [B,D] of states [B,S,D] and which are present [B,S].
    classify: logits [B,C] of that.
    """

    shape: Callable[[str, str], Shape]
    config: Callable[..., PreTrainedConfig]
    models: Mapping[str, type[PreTrainedModel]]
    positions: Positions
    rate: Callable[[Shape], float]
    parts: Parts | None
    lm: Callable[[Any, Tensor], Tensor]
    tag: Callable[[Any, Tensor], Tensor]
    pooled: Callable[[Any, Tensor, Tensor], Tensor]
    classify: Callable[[Any, Tensor], Tensor]


def _transformer(kind: str, size: str) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", size)
    if size not in SIZES and not found:
        raise ValueError(
            "expected tiny or HxLxA (width x layers x heads, such as 264x3x12), or"
            " bilstm:E,H (embeddings, LSTM)"
        )
    width, layers, heads = SIZES[size] if size in SIZES else map(int, found.groups())  # type: ignore[union-attr]
    if min(width, layers, heads) < 1 or width % heads:
        raise ValueError(
            f"the width {width} must be a multiple of the {heads} heads, and all at least 1"
        )
    if layers > width:
        raise ValueError(
            f"{layers} layers of width {width}; the order is width x layers x heads",
            f"{layers}x{width}x{heads}",
        )
    return Shape(kind, width, layers, heads, width)


def _rotary(kind: str, size: str) -> Shape:
    shape = _transformer(kind, size)
    each = shape.width // shape.heads
    if each % 2:
        raise ValueError(
            f"{each} dimensions a head; rotary positions need an even number: choose"
            f" {shape.heads * (each + 1)} or fewer heads"
        )
    return shape


def _recurrent(kind: str, size: str) -> Shape:
    found = re.fullmatch(r"(\d+),(\d+)", size)
    embeddings, one_way = map(int, found.groups()) if found else (0, 0)
    if min(embeddings, one_way) < 1:
        raise ValueError(
            "expected E,H, both at least 1 (width of the embeddings and of the LSTM in each"
            " direction, such as 300,600)"
        )
    return Shape(kind, 2 * one_way, 1, 0, embeddings)


def _bert(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> BertConfig:
    return BertConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
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
        intermediate_size=2 * shape.width,
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
        **common,
    )


def _bilstm(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> BiLstmConfig:
    return BiLstmConfig(
        embedding_size=shape.embeddings,
        lstm_size=shape.width // 2,
        num_hidden_layers=shape.layers,
        dropout=dropout,
        recurrent_dropout=dropout,
        **common,
    )


def _by_width(shape: Shape) -> float:
    return min(GREATEST_RATE, RATE_TIMES_WIDTH / shape.width)


def _first(model: Any, states: Tensor, present: Tensor) -> Tensor:
    return states[:, 0]


def _as_configured(model: Any, states: Tensor, present: Tensor) -> Tensor:
    """A ModernBERT's `classifier_pooling`: the first token, or the mean of all."""
    if model.config.classifier_pooling == "cls":
        return states[:, 0]
    return (states * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)


KINDS: dict[str, Kind] = {
    "bert": Kind(  # Devlin et al. 2019
        _transformer,
        _bert,
        {
            "mlm": BertForMaskedLM,
            "classification": BertForSequenceClassification,
            "tagging": BertForTokenClassification,
        },
        positions="learnt",
        rate=_by_width,
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
        tag=lambda model, states: model.classifier(model.dropout(states)),
        pooled=_first,
        classify=lambda model, pooled: model.classifier(
            model.dropout(model.bert.pooler(pooled[:, None]))
        ),
    ),
    "modernbert": Kind(  # Warner et al. 2024: rotary positions, normalised before a block
        _rotary,
        _modernbert,
        {
            "mlm": ModernBertForMaskedLM,
            "classification": ModernBertForSequenceClassification,
            "tagging": ModernBertForTokenClassification,
        },
        positions="rotary",
        rate=_by_width,
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
        tag=lambda model, states: model.classifier(model.drop(model.head(states))),
        pooled=_as_configured,
        classify=lambda model, pooled: model.classifier(model.drop(model.head(pooled))),
    ),
    "bilstm": Kind(  # Mukherjee & Awadallah 2019 and 2020
        _recurrent,
        _bilstm,
        {
            "mlm": BiLstmForMaskedLM,
            "classification": BiLstmForSequenceClassification,
            "tagging": BiLstmForTokenClassification,
        },
        positions="none",
        rate=lambda shape: RECURRENT_RATE,
        parts=None,
        lm=lambda model, states: model.logits(states),
        tag=lambda model, states: model.logits(states),
        pooled=lambda model, states, present: max_over(states, present),
        classify=lambda model, pooled: model.classifier(model.dropout(pooled)),
    ),
}


def parse_student(student: str, option: str = "--student ", default: str = DEFAULT_KIND) -> Shape:
    """The shape that `[KIND:]tiny`, `[KIND:]HxLxA` or `bilstm:E,H` asks for.

    `option` is what stands before it on the command line, `default` the kind where none is named.
    Raises UserError for anything else.
    """
    named, colon, size = student.rpartition(":")
    kind = named or default
    if kind not in KINDS:
        raise UserError(
            f"{option}{student}: no kind of student is called {kind}; there are {', '.join(KINDS)}"
        )
    try:
        return KINDS[kind].shape(kind, size)
    except ValueError as error:
        told, *meant = error.args
        before = option.rpartition(" ")[2] + named + colon  # what the value begins with
        hint = "".join(f": {before}{size}?" for size in meant)
        raise UserError(f"{option}{student}: {told}{hint}") from None


def make_student(
    student: str,
    tokenizer: Any,
    positions: int,
    option: str = "--student ",
    default: str = DEFAULT_KIND,
    task: TaskSpec | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """A model with random weights for the tokenizer's pieces and at most `positions` tokens.

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
    """Whether a student has attention maps."""
    return bool(getattr(student.config, "num_attention_heads", 0))


def head_of(student: PreTrainedModel) -> str:
    """`mlm` of a masked LM, or the kind of the task that a student is for."""
    models = _kind(student).models
    return next(head for head, model in models.items() if isinstance(student, model))


def lm_logits(student: PreTrainedModel, states: Tensor) -> Tensor:
    """LM-head logits [M,V] of flat last states [M,D] of a masked LM."""
    return _kind(student).lm(student, states)


def tag_logits(student: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [M,C] of flat last states [M,D] of a tagger."""
    return _kind(student).tag(student, states)


def class_logits(student: PreTrainedModel, states: Tensor, present: Tensor) -> Tensor:
    """Logits [B,C] of a classifier, of the last states [N,D] of all tokens that are `present`
    [B,S]."""
    return _kind(student).classify(student, sentence_states(student, states, present))


def sentence_states(student: PreTrainedModel, states: Tensor, present: Tensor) -> Tensor:
    """What a text is classified by, [B,D], of the last states [N,D] of all tokens that are
    `present` [B,S]: the first token's, the mean, or of a BiLSTM the largest of each channel."""
    padded = states.new_zeros(*present.shape, states.shape[1])
    padded[present] = states
    return _kind(student).pooled(student, padded, present)


def parts_of(student: PreTrainedModel) -> Parts | None:
    """What can be cut for a student out of a teacher of its kind; None for nothing."""
    return _kind(student).parts


def _kind(student: PreTrainedModel) -> Kind:
    return KINDS[student.config.model_type]
