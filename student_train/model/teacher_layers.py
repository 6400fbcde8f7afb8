"""Copies layers and masked-LM head of a teacher to a student of the same kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from teachonce.checkpoints.declared import first_position
from teachonce.student_train.model.any_student import kind_of
from teachonce.student_train.model.model_folder import WeightSource, split_layer
from teachonce.student_train.model.start_checks import layer_numbers
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

# DistilBERT's parameter names and BERT's. RoBERTa, XLM-R and ELECTRA have the same names as BERT.
DISTILBERT = {
    "transformer.layer.": "encoder.layer.",
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation")
"""Names of the activation in the configs of BERT, ModernBERT and DistilBERT."""
TYPES = "embeddings.token_type_embeddings.weight"
NOT_IN_FIRST = "attn_norm.weight"
"""The parameter that the first layer of a ModernBERT lacks."""
TRANSFORM = "cls.predictions.transform."
# The names of the masked-LM head in DistilBERT and in RoBERTa, and BERT's names.
HEADS = {
    "vocab_transform.": f"{TRANSFORM}dense.",
    "vocab_layer_norm.": f"{TRANSFORM}LayerNorm.",
    "lm_head.dense.": f"{TRANSFORM}dense.",
    "lm_head.layer_norm.": f"{TRANSFORM}LayerNorm.",
}


def layer_count(student: PreTrainedModel, store: WeightSource) -> tuple[int, str]:
    """Count the teacher's layers. Return 0 and a reason if a student cannot copy them."""
    kind, parts = student.config.model_type, kind_of(student).parts
    if parts is None:
        return 0, f"a {kind} has no layers in common with a teacher"
    bert_names = list(map(_bert_name, store.teacher_weights()))
    if any(name.startswith("embeddings_project.") for name in bert_names):
        return 0, "the teacher's embeddings are narrower than its layers"  # a small ELECTRA's
    layers = {split for name in bert_names if (split := split_layer(name, parts.layers))}
    if {part for _, part in layers} != set(parts.layer):
        return 0, f"the teacher's layers have other parameters than a {kind}'s"
    count = len({number for number, _ in layers})
    complete = {(number, part) for number in range(count) for part in parts.layer}
    if missing := sorted(complete - layers - {(0, NOT_IN_FIRST)}):
        return 0, f"the teacher's weights lack {parts.layers}{missing[0][0]}.{missing[0][1]}"
    if not parts.positions:
        # Rotary positions turn fixed pairs of channels, so no part of a head can be copied.
        configs = vars(student.config), store.teacher_settings("config.json")
        # The config is untrusted: a size may be missing, zero, or no number.
        try:
            own, theirs = (c["hidden_size"] // c["num_attention_heads"] for c in configs)
        except (LookupError, TypeError, ZeroDivisionError):
            return 0, "the teacher's config.json does not give the size of its heads"
        if own != theirs:
            return 0, f"the teacher's heads have size {theirs}, the student's {own}, and are rotary"
    return count, ""


def cut_layers(student: PreTrainedModel, how: str, layer_list: str, store: WeightSource) -> str:
    """Copy everything but word embeddings and head from the teacher. Return a line for the model
    card.

    how: the value of `--init`.
    layer_list: numbers of the teacher's layers, from 1, as in `--init layers:1,3`; "" for all.

    Feed-forward units that the teacher does not have are initialised so that they have no effect.
    Raises UserError if the chosen layers cannot be copied.
    """
    weights, parts = store.teacher_weights(), kind_of(student).parts
    assert parts is not None  # `initialise` has refused
    embeddings = student.get_input_embeddings().weight
    bert_names = {_bert_name(name): name for name in weights}
    inside: dict[str, Tensor] = {}
    around: dict[str, Tensor] = {}
    for name, parameter in student.base_model.named_parameters():
        if parameter is not embeddings and not name.startswith("pooler."):
            (inside if name.startswith(parts.layers) else around)[name] = parameter
    for name in around.keys() & bert_names.keys():
        values = np.asarray(weights[bert_names[name]], np.float32)
        if name == parts.positions:
            # RoBERTa's positions start after its padding id, a student's at 0.
            values = values[first_position(store.teacher_settings("config.json")) :]
        _copy_block(around[name], values)
    types = around.get(TYPES)
    if types is not None and TYPES not in bert_names:
        types.zero_()  # DistilBERT has none: a random row would be added to every token
    count, why = layer_count(student, store)
    if not count:
        if layer_list:
            raise UserError(
                f"--init {how}: layers cannot be copied: {why}; choose a --student of this model's"
                " kind and head size, such as bert:HxLxA for a BERT, or use --init svd"
            )
        return f"random layers: {why}"
    if "@" in how:
        _check_whole(how, student, store)
    groups = assigned_layers(layer_list, count, student.config.num_hidden_layers)
    for name, target in inside.items():
        number, _, part = name.removeprefix(parts.layers).partition(".")
        names = (f"{parts.layers}{n - 1}.{part}" for n in groups[int(number)])
        sources = [np.asarray(weights[bert_names[n]], np.float32) for n in names if n in bert_names]
        if sources:  # empty for NOT_IN_FIRST if the group is only the first layer
            _copy_block(target, np.mean(sources, axis=0), parts.stacked.get(part, 1))
    numbers = ", ".join("+".join(map(str, group)) for group in groups)
    differences = _differences(student, store)
    return f"layers {numbers} of {count}, cut to {student.config.hidden_size}{differences}"


def _differences(student: PreTrainedModel, store: WeightSource) -> str:
    """Describe how a student differs from the teacher in more than its weights; "" if it does
    not."""
    teacher, config = store.teacher_settings("config.json"), student.config.to_dict()
    acts = [next((c[n] for n in ACTIVATIONS if c.get(n)), None) for c in (teacher, config)]
    differences = []
    if acts[0] is not None and acts[0] != acts[1]:
        differences.append(f"activation {acts[1]}, and the teacher's is {acts[0]!r:.40}")
    if teacher.get("is_decoder"):
        differences.append("bidirectional, and the teacher reads from left to right")
    return f" ({'; '.join(differences)})" if differences else ""


def _check_whole(how: str, student: PreTrainedModel, store: WeightSource) -> None:
    """Check that a student can copy another model's layers without cutting them.

    Raises UserError unless hidden size and number of heads are equal, and the student's
    feed-forward size is at least the model's. The teacher of a store may be larger.
    """
    config, teacher = student.config, store.teacher_settings("config.json")
    sizes = {  # the config's names in BERT and in DistilBERT
        "hidden size": ("hidden_size", "dim"),
        "number of heads": ("num_attention_heads", "n_heads"),
        "feed-forward size": ("intermediate_size", "hidden_dim"),
    }
    for label, names in sizes.items():
        expected = next((teacher[name] for name in names if name in teacher), None)
        size = getattr(config, names[0])
        # `_copy_block` sets additional feed-forward units to have no effect.
        wider = "feed" in label and isinstance(expected, int) and size > expected
        if size != expected and not wider:
            raise UserError(
                f"--init {how}: the {label} of {store.path} is {expected}, but the student's is"
                f" {size}, and layers can only be copied whole; give --student teacher:L, with L"
                " layers of the teacher's sizes"
            )


def assigned_layers(layer_list: str, teacher_layers: int, student_layers: int) -> list[list[int]]:
    """Assign teacher layers (from 1) to every student layer: the chosen ones, or by default all
    layers in consecutive groups.

    Raises UserError for layers that the teacher does not have, and for more student layers than
    teacher layers.
    """
    if not layer_list:
        if student_layers > teacher_layers:
            raise UserError(
                f"--init teacher: the student has {student_layers} layers, the teacher only"
                f" {teacher_layers}; give --student at most {teacher_layers} layers, or use --init"
                " svd"
            )
        bounds = np.linspace(0, teacher_layers, student_layers + 1).round().astype(int)
        return [list(range(a + 1, b + 1)) for a, b in zip(bounds, bounds[1:], strict=False)]
    return [[n] for n in layer_numbers(layer_list, teacher_layers, student_layers)]


def take_transform(student: PreTrainedModel, weights: Mapping[str, Array]) -> bool:
    """Copy the transform of the masked-LM head. Return whether it was copied: both models must have
    a transform of the same size."""
    parts = kind_of(student).parts
    assert parts is not None  # `initialise` has refused
    bert_names = {_bert_name(name): name for name in weights}
    params = {n: p for n, p in student.named_parameters() if n.startswith(parts.transform)}
    values = {n: np.asarray(weights[bert_names[n]], np.float32) for n in params if n in bert_names}
    if not params or any(n not in values or values[n].shape != p.shape for n, p in params.items()):
        return False
    for name, parameter in params.items():
        parameter.copy_(torch.from_numpy(values[name]))
    return True


def _bert_name(name: str) -> str:
    """Translate a parameter's name to BERT's. Names without a counterpart are unchanged."""
    if name.startswith("transformer.layer."):
        for other, bert_name in DISTILBERT.items():
            name = name.replace(other, bert_name)
    for other, bert_name in HEADS.items():
        if name.startswith(other):
            return bert_name + name.removeprefix(other)
    return name


def _copy_block(parameter: Tensor, values: Array, stacked: int = 1) -> None:
    """Copy the leading block that is common to both shapes, for each of the stacked matrices."""
    # Columns beyond the block become zero: their inputs are units that the teacher does not have.
    # Stacked matrices are cut one by one: the first rows of a whole Wqkv are all of Q.
    pairs = zip(parameter.chunk(stacked), np.split(values, stacked), strict=True)
    for target, source in pairs:
        block = tuple(slice(0, min(a, b)) for a, b in zip(target.shape, source.shape, strict=True))
        target[block] = torch.from_numpy(source[block]).to(target.dtype)
        if target.ndim == 2:
            target[:, source.shape[1] :] = 0
