"""The kinds of student: an entry of `KINDS` for each defines its config, its models, and how its
heads are applied. `settings/shapes.py` parses shapes; `any_student.py` uses the entries.

Shape letters: B batch, S tokens, M flat tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from teachonce.checkpoints.bilstm import (
    BiLstmConfig,
    BiLstmForMaskedLM,
    BiLstmForSequenceClassification,
    BiLstmForTokenClassification,
)
from teachonce.checkpoints.labels import PAIRS
from teachonce.checkpoints.static import StaticConfig, StaticModel
from teachonce.store.format.features import TaskSpec
from teachonce.student_train.settings.shapes import GROUP, SHAPES, Shape, parse_student
from teachonce.support.errors import UserError
from teachonce.support.packages import load_outside


@dataclass(frozen=True)
class Parts:
    """Lists the parameters that can be copied from a teacher of the same kind. Names of parameters
    of the base model are relative to it.

    layers: what precedes a layer's number in the names of its parameters.
    layer: the parameters of each layer; a teacher with other parameters is of another kind.
    positions: the learnt position embeddings; None if positions are rotary.
    transform: the prefix of the parameters of the masked-LM head's transform.
    bias: the output bias of the masked-LM head.
    stacked: the number of matrices in each parameter of a layer that stacks several.
    """

    layers: str
    layer: tuple[str, ...]
    positions: str | None
    transform: str
    bias: str
    stacked: Mapping[str, int] = field(default_factory=dict)


def _headless(*_: Any) -> Tensor:
    raise AssertionError("the student has no such head, and the plan refuses losses that need one")


@dataclass(frozen=True)
class ModelKind:
    """Defines the models of one kind of student. Its key in `KINDS` is its key in `SHAPES` and the
    `model_type` of its config.

    config: makes the config from a shape, a tokenizer, the max length and common settings.
    models: the class of a masked LM (`mlm`) and of each kind of task.
    lm: from states [M,D] to logits [M,V]. A kind leaves out this and the next functions for heads
        that it does not have.
    tag: from states [M,D] to the input of a tagger's last linear layer, `classifier`.
    pooled: from states [B,S,D] and the mask [B,S] to one state per text [B,D].
    classify: from the result of `pooled` to the input of a classifier's last linear layer,
        `classifier`.
    drop: applies the dropout of the kind to states [M,D] before they are compared with the
        teacher's (Mukherjee & Awadallah 2019, section 6: after every layer).
    parts: the parameters that can be copied from a teacher of that kind; None if none can. Decoders
        are cut out instead (`decoder_cut.PARTS`).
    """

    config: Callable[..., PreTrainedConfig]
    models: Mapping[str, type[PreTrainedModel]]
    lm: Callable[[Any, Tensor], Tensor] = _headless
    tag: Callable[[Any, Tensor], Tensor] = _headless
    pooled: Callable[[Any, Tensor, Tensor], Tensor] = _headless
    classify: Callable[[Any, Tensor], Tensor] = _headless
    drop: Callable[[Any, Tensor], Tensor] = lambda model, states: states
    parts: Parts | None = None


def _sizes(shape: Shape, positions: int) -> dict[str, Any]:
    """Return the sizes that have the same names in the configs of most kinds."""
    return {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": positions,
    }


def _bert(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> BertConfig:
    return BertConfig(
        **_sizes(shape, positions),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **common,
    )


def _modernbert(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> ModernBertConfig:
    return ModernBertConfig(
        **_sizes(shape, positions),
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        attention_dropout=dropout,
        classifier_dropout=dropout,
        layer_types=["full_attention"] * shape.layers,
        # The config's defaults, such as 50281, are ids of ModernBERT's own vocabulary.
        cls_token_id=tokenizer.cls_token_id,
        bos_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        eos_token_id=tokenizer.sep_token_id,
        # transformers 4 reads this in place of layer_types.
        **{**common, "global_attn_every_n_layers": 1},
    )


def _ends(tokenizer: Any) -> dict[str, Any]:
    # The config's defaults, such as GPT-2's 50256, are ids of another vocabulary.
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}


def _gpt2(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> GPT2Config:
    return GPT2Config(
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.feed_forward,
        n_positions=positions,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        **_ends(tokenizer),
        **common,
    )


def _gated(config: Callable[..., PreTrainedConfig]) -> Callable[..., PreTrainedConfig]:
    """Return a function that makes configs of decoders with rotary positions and gated feed-forward
    layers.

    config: the config class of the kind.
    """

    def make_config(
        shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
    ) -> PreTrainedConfig:
        result = config(
            **_sizes(shape, positions),
            num_key_value_heads=shape.key_value_heads,
            # Qwen3's config has a default of 128, whatever the hidden size is.
            head_dim=shape.head_size,
            attention_dropout=dropout,
            **_ends(tokenizer),
            # `--init` sets only the word embeddings, which are then the output embeddings, too;
            # only a folder may have both.
            **{"tie_word_embeddings": True, **common},
        )
        if rotary := common.get("rope_parameters"):
            # transformers 4 reads these; 5 declares `rope_scaling` a synonym and warns.
            scaling = {name: value for name, value in rotary.items() if name != "rope_theta"}
            vars(result)["rope_theta"] = rotary["rope_theta"]
            vars(result)["rope_scaling"] = scaling if len(scaling) > 1 else None
        return result

    return make_config


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
        lstm_size=shape.width // 2,  # `width` counts both directions
        num_hidden_layers=shape.layers,
        dropout=dropout,
        recurrent_dropout=dropout if recurrent_dropout is None else recurrent_dropout,
        **common,
    )


def _static(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> StaticConfig:
    # Tokens that the template adds to a text are left out of its vector; an unknown word is not.
    special = [i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]
    return StaticConfig(hidden_size=shape.width, special_ids=special, **common)


def first_state(model: Any, states: Tensor, present: Tensor) -> Tensor:
    return states[:, 0]


def _as_configured(model: Any, states: Tensor, present: Tensor) -> Tensor:
    """Pool by a ModernBERT's `classifier_pooling`: the first token's state, or the mean."""
    if model.config.classifier_pooling == "cls":
        return states[:, 0]
    return (states * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)


def _decoder(config: Callable[..., PreTrainedConfig], model: type[PreTrainedModel]) -> ModelKind:
    return ModelKind(config, {"causal": model}, lm=lambda model, states: model.lm_head(states))


KINDS: dict[str, ModelKind] = {
    "bert": ModelKind(  # Devlin et al. 2019
        _bert,
        {
            "mlm": BertForMaskedLM,
            "classification": BertForSequenceClassification,
            "tagging": BertForTokenClassification,
        },
        parts=Parts(
            "encoder.layer.",
            tuple(
                f"{name}.{part}"
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
                for part in ("weight", "bias")
            ),
            "embeddings.position_embeddings.weight",
            "cls.predictions.transform.",
            "cls.predictions.bias",
        ),
        lm=lambda model, states: model.cls(states),
        tag=lambda model, states: model.dropout(states),
        pooled=first_state,
        classify=lambda model, pooled: model.dropout(model.bert.pooler(pooled[:, None])),
    ),
    "modernbert": ModelKind(  # Warner et al. 2024: rotary positions, normalised before a block
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
    "gpt2": _decoder(_gpt2, GPT2LMHeadModel),  # Radford et al. 2019
    "llama": _decoder(_gated(LlamaConfig), LlamaForCausalLM),  # Touvron et al. 2023
    "qwen2": _decoder(_gated(Qwen2Config), Qwen2ForCausalLM),
    "qwen3": _decoder(_gated(Qwen3Config), Qwen3ForCausalLM),
    "bilstm": ModelKind(  # Mukherjee & Awadallah 2019 and 2020
        _bilstm,
        {
            "mlm": BiLstmForMaskedLM,
            "classification": BiLstmForSequenceClassification,
            "tagging": BiLstmForTokenClassification,
        },
        lm=lambda model, states: model.logits(states),
        tag=lambda model, states: model.dropout(model.projected(states)),
        pooled=lambda model, states, present: model.pooled(states, present),
        drop=lambda model, states: model.dropout(states),
        classify=lambda model, pooled: model.dropout(model.projected(pooled)),
    ),
    "static": ModelKind(_static, {"mlm": StaticModel}),
}


def find_models(kind: str) -> ModelKind:
    """Find the `ModelKind` of a kind of student, of this package or of the package that adds it.

    Raises UserError if it cannot be imported, or is not a `ModelKind`.
    """
    if kind not in KINDS:
        loaded = load_outside(SHAPES[kind].models, GROUP, "--student")
        if not isinstance(loaded, ModelKind):
            raise UserError(f"--student {kind}: expected a ModelKind, got {type(loaded).__name__}")
        KINDS[kind] = loaded
    return KINDS[kind]


def make_student(
    student: str,
    tokenizer: Any,
    positions: int,
    option: str = "--student ",
    task: TaskSpec | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Make a model with random weights: a masked LM, or for a task a classifier or tagger.

    positions: the largest number of tokens in a text; a BiLSTM has no limit.
    settings: further arguments of `ModelKind.config`.
    Raises UserError for an invalid `student`; see `parse_student`.
    """
    shape = parse_student(student, option)
    common: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if task:
        common["id2label"] = dict(enumerate(task.labels))
        common["label2id"] = {label: number for number, label in enumerate(task.labels)}
        if task.later_label is not None:
            common["later_label"] = task.later_label
        if task.problem_type is not None:
            common["problem_type"] = task.problem_type
        if task.kind == "classification":
            common[PAIRS] = task.separator is not None
    kind = find_models(shape.kind)
    head = task.kind if task else "causal" if shape.causal else "mlm"
    if head not in kind.models:
        raise UserError(
            f"{option}{student}: this kind of student has no model for {head}, only for"
            f" {', '.join(kind.models)}; choose another kind"
        )
    config = kind.config(shape, tokenizer, positions, **settings, **common)
    KINDS.setdefault(config.model_type, kind)  # the key by which `any_student.py` finds it
    return kind.models[head](config)
