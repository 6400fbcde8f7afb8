"""What is cut for a student out of a BERT-like teacher: its layers and its masked-LM head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from store import FeatureStore
from store.errors import UserError
from store.positions import first_position

# Names of other families' parameters as BERT has them; RoBERTa, XLM-R and ELECTRA have BERT's own.
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
TRANSFORM = "cls.predictions.transform."
HEADS = {
    "vocab_transform.": f"{TRANSFORM}dense.",
    "vocab_layer_norm.": f"{TRANSFORM}LayerNorm.",
    "lm_head.dense.": f"{TRANSFORM}dense.",
    "lm_head.layer_norm.": f"{TRANSFORM}LayerNorm.",
}
BERT = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def layer_count(weights: Mapping[str, np.ndarray]) -> int:
    """The teacher's layers, if they are such as BERT's; else 0."""
    plain = {_bert_name(name) for name in weights}
    needed = (f"encoder.layer.0.{name}.{kind}" for name in BERT for kind in ("weight", "bias"))
    if not plain.issuperset(needed):
        return 0
    return 1 + max(int(n.split(".")[2]) for n in plain if n.startswith("encoder.layer."))


def cut_layers(student: PreTrainedModel, how: str, chosen: str, store: FeatureStore) -> str:
    """Everything but the words; says what was taken."""
    weights, body = store.teacher_weights(), cast(Any, student.base_model)
    plain = {_bert_name(name): name for name in weights}
    first = first_position(json.loads(store.teacher_file("config.json")))
    _copy_around_words(body.embeddings, weights, plain, first)
    count, width = layer_count(weights), student.config.hidden_size
    if not count:
        other = "the teacher's layers are not BERT's, so a student's cannot be cut out of them"
        if chosen:
            raise UserError(f"--init {how}: {other}; use --init teacher or svd")
        return f"layers at random: {other}"
    groups = layer_groups(chosen, count, student.config.num_hidden_layers)
    for layer, group in zip(body.encoder.layer, groups, strict=True):
        _copy_layer(layer, group, weights, plain)
    told = ", ".join("+".join(map(str, group)) for group in groups)
    return f"layers {told} of {count}, cut to {width}"


def layer_groups(chosen: str, teacher_layers: int, student_layers: int) -> list[list[int]]:
    """Teacher layers (from 1) for every student layer: those chosen, or all of them in consecutive
    groups."""
    if not chosen:
        if student_layers > teacher_layers:
            raise UserError(
                f"--init teacher: {student_layers} student layers from {teacher_layers} of the"
                " teacher; use --init svd"
            )
        bounds = np.linspace(0, teacher_layers, student_layers + 1).round().astype(int)
        return [list(range(a + 1, b + 1)) for a, b in zip(bounds, bounds[1:], strict=False)]
    try:
        numbers = [int(word) for word in chosen.split(",")]
    except ValueError:
        raise UserError(f"--init layers:{chosen}: expected numbers such as layers:1,3,5") from None
    if len(numbers) != student_layers or not all(1 <= n <= teacher_layers for n in numbers):
        raise UserError(
            f"--init layers:{chosen}: expected {student_layers} numbers (one a student layer) from"
            f" 1 to {teacher_layers}"
        )
    return [[n] for n in numbers]


def take_transform(student: PreTrainedModel, weights: Mapping[str, np.ndarray]) -> bool:
    """Set the transform of a masked-LM head to the teacher's, if both have one of one width;
    whether they do."""
    plain = {_bert_name(name): name for name in weights}
    own = {n: p for n, p in student.named_parameters() if n.startswith(TRANSFORM)}
    theirs = {name: np.asarray(weights[plain[name]], np.float32) for name in own if name in plain}
    if not own or any(n not in theirs or theirs[n].shape != p.shape for n, p in own.items()):
        return False
    for name, parameter in own.items():
        parameter.copy_(torch.from_numpy(theirs[name]))
    return True


def _bert_name(name: str) -> str:
    for other, own in DISTILBERT.items():
        if (
            name.startswith(("transformer.layer.", "encoder.layer."))
            and ".attention.self." not in name
        ):
            name = name.replace(other, own)
    for other, own in HEADS.items():
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


def _copy_around_words(
    embeddings: nn.Module, weights: Mapping[str, np.ndarray], plain: Mapping[str, str], first: int
) -> None:
    """Positions, types and the norm of the embeddings, where the teacher has them."""
    for name, parameter in embeddings.named_parameters():
        found = plain.get(f"embeddings.{name}")
        if found and not name.startswith("word_embeddings"):
            values = np.asarray(weights[found], np.float32)
            begin = first if name.startswith("position_embeddings") else 0
            _copy_block(parameter, values[begin:])


def _copy_layer(
    layer: nn.Module,
    group: Sequence[int],
    weights: Mapping[str, np.ndarray],
    plain: Mapping[str, str],
) -> None:
    """Every parameter: the mean over the group of the teacher's."""
    for name, parameter in layer.named_parameters():
        found = [plain[f"encoder.layer.{n - 1}.{name}"] for n in group]
        _copy_block(parameter, np.mean([np.asarray(weights[f], np.float32) for f in found], axis=0))


def _copy_block(parameter: nn.Parameter, values: np.ndarray) -> None:
    """The leading block that both shapes have."""
    block = tuple(slice(0, min(a, b)) for a, b in zip(parameter.shape, values.shape, strict=True))
    parameter[block] = torch.from_numpy(values[block]).to(parameter.dtype)
