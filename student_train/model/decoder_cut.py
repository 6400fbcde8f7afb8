"""Cuts a decoder out of a teacher of the same kind: chosen layers, and in them the heads, the
feed-forward units and the channels with the largest activations (Minitron, Muralidharan et al.
2024, https://arxiv.org/abs/2407.14679, section 2). Activations of heads and units are multiplied by
the norms of the weights that read them (Wanda, Sun et al. 2023, https://arxiv.org/abs/2306.11695,
equation 1): a unit that nothing reads has importance 0.

Shape letters: L layers, D channels of the residual stream, A heads, F feed-forward units.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from teachonce.store import FeatureStore
from teachonce.student_train.model.decoder_sizes import Sizes, copied_settings
from teachonce.student_train.model.model_folder import WeightSource, split_layer
from teachonce.student_train.model.start_checks import layer_numbers
from teachonce.support.arrays import Array, Floats, spread
from teachonce.support.errors import UserError

TOKENS = 4096  # of the store, spread over its sequences


@dataclass(frozen=True)
class DecoderParts:
    """Lists the parameters of a decoder that can be cut out of a teacher of the same kind, relative
    to the base model.

    layers: what precedes a layer's number in the names of its parameters, such as `layers.`.
    layer: the axes of each parameter of a layer. around: of all other parameters except word
        embeddings.
        D: channels of the residual stream; Q, K: query heads, key-value heads; 3: Q, K and V
        one after the other; H: channels of a head; F: feed-forward units; P: positions.
    heads_into, units_into: the linear layers that read the heads' outputs, and the feed-forward
        units.
    units: the config's name for the feed-forward size.
    """

    layers: str
    layer: Mapping[str, str]
    around: Mapping[str, str]
    heads_into: str
    units_into: str
    units: str


# GPT-2's linear layers store weights as inputs x outputs, other decoders as outputs x inputs.
GPT2_LAYER = {
    **{f"{norm}.{part}": "D" for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
    "attn.c_attn.weight": "D3",
    "attn.c_attn.bias": "3",
    "attn.c_proj.weight": "QD",
    "attn.c_proj.bias": "D",
    "mlp.c_fc.weight": "DF",
    "mlp.c_fc.bias": "F",
    "mlp.c_proj.weight": "FD",
    "mlp.c_proj.bias": "D",
}
GPT2 = DecoderParts(
    "h.",
    GPT2_LAYER,
    {"wpe.weight": "PD", "ln_f.weight": "D", "ln_f.bias": "D"},
    "attn.c_proj",
    "mlp.c_proj",
    "n_inner",
)
LLAMA_LAYER = {
    "input_layernorm.weight": "D",
    "self_attn.q_proj.weight": "QD",
    "self_attn.k_proj.weight": "KD",
    "self_attn.v_proj.weight": "KD",
    "self_attn.o_proj.weight": "DQ",
    "post_attention_layernorm.weight": "D",
    "mlp.gate_proj.weight": "FD",
    "mlp.up_proj.weight": "FD",
    "mlp.down_proj.weight": "DF",
}
LLAMA = DecoderParts(
    "layers.",
    LLAMA_LAYER,
    {"norm.weight": "D"},
    "self_attn.o_proj",
    "mlp.down_proj",
    "intermediate_size",
)
QWEN2_LAYER = {
    **LLAMA_LAYER,
    **{f"self_attn.{name}_proj.bias": axis for name, axis in (("q", "Q"), ("k", "K"), ("v", "K"))},
}
QWEN3_LAYER = {**LLAMA_LAYER, "self_attn.q_norm.weight": "H", "self_attn.k_norm.weight": "H"}
PARTS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, layer=QWEN2_LAYER),
    "qwen3": replace(LLAMA, layer=QWEN3_LAYER),
}
"""The parameters that can be cut out, by kind of student."""


@dataclass(frozen=True)
class Importance:
    """Holds the importance of channels, heads and units: root mean squares over tokens, float64.

    channels: [D], computed from the norms' outputs, averaged over all norms. heads, units: [L,A]
        and [L,F], computed from what each head or unit adds to the residual stream.
    """

    channels: Floats
    heads: Floats
    units: Floats


def cut_decoder(
    student: PreTrainedModel,
    parts: DecoderParts,
    layer_list: str,
    source: WeightSource,
    store: FeatureStore,
) -> tuple[str, Array]:
    """Copy everything but word embeddings from a teacher that `check_cut` has accepted.

    layer_list: numbers of the teacher's layers, from 1, as in `--init layers:1,3`; "" spreads them
        evenly.
    store: has the tokens on which activations are measured, if the student has smaller layers.
    Returns a line for the card, and the numbers of the channels that the student has. Raises
    UserError for layers that are missing, and for weights that do not fit the config.
    """
    weights, sizes = source.teacher_weights(), Sizes.of_config(student.config.to_dict(), "student")
    teacher = Sizes.of_config(source.teacher_settings("config.json"), source.path)
    count = _layer_count(parts, teacher, source)
    depth = student.config.num_hidden_layers
    numbers = layer_numbers(layer_list, count, depth) if layer_list else spread_layers(count, depth)
    importance, by = None, ""
    # Layers of equal sizes are copied whole, and the teacher need not run.
    if sizes != teacher:
        importance, tokens = measure(student, parts, source, store)
        by = f", by the activations of {tokens:,} tokens"
    cut = [_Cut(teacher, sizes, importance, number - 1) for number in numbers]
    for name, parameter in student.base_model.named_parameters():
        index, axes = 0, parts.around.get(name)
        if (numbered := split_layer(name, parts.layers)) is not None:
            index, part = numbered
            axes, name = parts.layer[part], f"{parts.layers}{numbers[index] - 1}.{part}"
        if axes is not None:  # not the word embeddings
            values = np.asarray(weights[name], np.float32)
            values = values[np.ix_(*map(cut[index].along, axes, values.shape))]
            # Positions are not cut, and a student may have more or fewer of them than its teacher.
            parameter[: len(values)] = torch.from_numpy(values[: len(parameter)])
    line = f"{sizes.width} of {teacher.width} channels, {sizes.heads} of {teacher.heads} heads"
    line += f", {sizes.units} of {teacher.units} feed-forward units"
    line = f"layers {', '.join(map(str, numbers))} of {count}; {line}{by}"
    return line, cut[0].along("D", teacher.width)


def spread_layers(count: int, layers: int) -> list[int]:
    """Choose `layers` of the teacher's layers 1..`count`, evenly spaced, among them the first and
    the last. Raises UserError if `layers` is larger than `count`."""
    # The first and the last layer change a decoder's states most (Minitron, figure 4).
    if layers > count:
        raise UserError(
            f"--init teacher: the student has {layers} layers, the teacher only {count}; give"
            f" --student at most {count} layers, or use --init vocab"
        )
    return [int(n) for n in np.linspace(1, count, layers).round()]


@dataclass(frozen=True)
class _Cut:
    """Chooses the entries of a teacher layer's arrays that the student gets."""

    teacher: Sizes
    student: Sizes
    importance: Importance | None
    layer: int

    def along(self, axis: str, size: int) -> Array:
        """Return the chosen indices along an axis of `size` entries, ascending. `axis` is a letter
        of `DecoderParts`."""
        teacher, importance = self.teacher, self.importance
        # `check_cut` requires heads of the student's size, and positions are cut by the caller.
        if importance is None or axis in "HP":
            return np.arange(size)
        if axis == "D":
            return largest(importance.channels, self.student.width)
        if axis == "F":
            return largest(importance.units[self.layer], self.student.units)
        heads, groups = chosen_heads(importance.heads[self.layer], teacher, self.student)
        if axis == "K":
            return _of_heads(groups, teacher.head_size)
        queries = _of_heads(heads, teacher.head_size)
        if axis == "Q":
            return queries
        width = teacher.heads * teacher.head_size
        return np.concatenate([queries + n * width for n in range(3)])


def largest(values: Floats, count: int) -> Array:
    """Return the positions of the `count` largest values, ascending. Of equal values the first
    count."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def chosen_heads(importance: Floats, teacher: Sizes, student: Sizes) -> tuple[Array, Array]:
    """Choose the teacher's query heads [A'] and key-value heads [K'] that a student gets.

    Query heads that share a key-value head stay together. In each such group of the teacher, the
    most important heads form a set of the size of a student's group, the next ones another set, and
    so on. The best of all sets are chosen.
    """
    together = teacher.heads // teacher.groups
    size = student.heads // student.groups
    sets = []
    for group in range(teacher.groups):
        first = group * together
        order = first + np.argsort(-importance[first : first + together], kind="stable")
        full_sets = order[: together - together % size].reshape(-1, size)
        sets += [(group, np.sort(heads)) for heads in full_sets]
    weight = np.array([importance[heads].sum() for _, heads in sets])
    best = [sets[i] for i in largest(weight, student.groups)]
    return np.concatenate([heads for _, heads in best]), np.array([g for g, _ in best])


def _of_heads(heads: Array, size: int) -> Array:
    return (heads[:, None] * size + np.arange(size)).ravel()


def _layer_count(parts: DecoderParts, sizes: Sizes, source: WeightSource) -> int:
    """Count the layers of a teacher. Raises UserError if its weights have other names or shapes
    than its config declares."""
    weights = source.teacher_weights()
    inside = filter(None, (split_layer(name, parts.layers) for name in weights))
    count = len({number for number, _ in inside})
    names = {
        f"{parts.layers}{n}.{part}": axes
        for n in range(count)
        for part, axes in parts.layer.items()
    }
    names |= parts.around
    if missing := sorted(names.keys() - weights.keys()):
        raise UserError(f"{source.path}: the teacher's weights lack {missing[0]}; use --init vocab")
    lengths = {
        "D": sizes.width, "F": sizes.units, "H": sizes.head_size,
        "Q": sizes.heads * sizes.head_size, "K": sizes.groups * sizes.head_size,
        "3": 3 * sizes.heads * sizes.head_size,
    }  # fmt: skip
    for name, axes in names.items():
        shape = weights[name].shape
        expected = tuple(lengths.get(axis, size) for axis, size in zip(axes, shape, strict=False))
        if len(shape) != len(axes) or shape != expected:
            raise UserError(
                f"{source.path}: {name} of the teacher has shape {list(shape)}, but"
                f" {list(expected)} by its config.json; dump again, or use --init vocab"
            )
    return count


@torch.no_grad()
def measure(
    student: PreTrainedModel, parts: DecoderParts, source: WeightSource, store: FeatureStore
) -> tuple[Importance, int]:
    """Run a teacher over `TOKENS` tokens of a store. Return the importance of its channels, heads
    and units, and the number of tokens read."""
    teacher = _teacher(student, parts, source)
    sizes = Sizes.of_config(source.teacher_settings("config.json"), source.path)
    squares, tokens = _squares(teacher, parts, store)
    modules = dict(teacher.named_modules())

    def contribution(end: str) -> Floats:
        per_layer = []
        for layer in range(teacher.config.num_hidden_layers):
            name = f"{parts.layers}{layer}.{end}"
            over = parts.layer[f"{end}.weight"].index("D")
            per_layer.append(squares[name] * modules[name].weight.double().square().sum(dim=over))
        return torch.stack(per_layer).numpy()

    heads = contribution(parts.heads_into).reshape(-1, sizes.heads, sizes.head_size).sum(axis=2)
    norms = [v.sqrt() for name, v in squares.items() if _axes(f"{name}.weight", parts) == "D"]
    channels = torch.stack(norms).mean(dim=0).numpy()
    return Importance(channels, np.sqrt(heads), np.sqrt(contribution(parts.units_into))), tokens


def _squares(
    teacher: Any, parts: DecoderParts, store: FeatureStore
) -> tuple[dict[str, Tensor], int]:
    """Return mean squares over tokens, float64, by module name: of the outputs [D] of each norm,
    and of the inputs of `heads_into` and `units_into`. Also return the number of tokens read."""
    totals = dict[str, Tensor]()

    def add(name: str, values: Tensor) -> None:
        total = values.double().square().sum(dim=(0, 1))
        totals[name] = totals[name] + total if name in totals else total

    for name, module in teacher.named_modules():
        if name.endswith((parts.heads_into, parts.units_into)):
            module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
        elif _axes(f"{name}.weight", parts) == "D":
            module.register_forward_hook(lambda _, inputs, out, name=name: add(name, out))
    tokens, longest = 0, teacher.config.max_position_embeddings
    for ids in _sequences(store):
        if int(ids.max()) >= teacher.config.vocab_size:
            raise UserError(
                f"{store.path}: token {int(ids.max())} has no row in the teacher's word embeddings;"
                " use --init random"
            )
        # One sequence at a time, as padding would count in the means.
        teacher(input_ids=ids[None, :longest], use_cache=False)
        tokens += len(ids[:longest])
    return {name: total / tokens for name, total in totals.items()}, tokens


def _axes(name: str, parts: DecoderParts) -> str | None:
    """Return the letters of a parameter's axes (see `DecoderParts`), or None if the student does
    not copy it from the teacher."""
    numbered = split_layer(name, parts.layers)
    return parts.around.get(name) if numbered is None else parts.layer.get(numbered[1])


def _teacher(student: PreTrainedModel, parts: DecoderParts, source: WeightSource) -> Any:
    """Make the teacher from its stored weights, as a model of the student's class."""
    stored = source.teacher_settings("config.json")
    sizes, config = Sizes.of_config(stored, source.path), copy.deepcopy(student.config)
    # Only the sizes in the copy of the student's config change: `prepare` gave it the teacher's
    # other settings.
    if wrong := {n: v for n, v in copied_settings(stored).items() if getattr(config, n) != v}:
        raise ValueError(f"the student's config lacks the teacher's {wrong}; see `prepare`")
    weights = source.teacher_weights()
    config.hidden_size, config.num_attention_heads = sizes.width, sizes.heads
    config.num_key_value_heads, config.head_dim = sizes.groups, sizes.head_size
    setattr(config, parts.units, sizes.units)
    config.num_hidden_layers = _layer_count(parts, sizes, source)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    if positions := [name for name, axes in parts.around.items() if "P" in axes]:
        config.max_position_embeddings = len(weights[positions[0]])
    # Making a model draws random weights. The student's own must not depend on whether a teacher
    # was made.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        # On the meta device, which allocates nothing: only the names are needed.
        names = list(type(student.base_model)(config).state_dict())
    # `DecoderParts` lacks only one parameter, the word embeddings.
    (embedding,) = (name for name in names if _axes(name, parts) is None)
    config.vocab_size = len(weights[embedding])
    with torch.random.fork_rng(devices=[]):
        model = type(student.base_model)(config)
    # In float32: a teacher needs four bytes of memory for each weight.
    state = {name: torch.from_numpy(np.array(weights[name], np.float32)) for name in names}
    model.load_state_dict(state, assign=True)
    return model.eval()


def _sequences(store: FeatureStore) -> Iterator[Tensor]:
    """Yield the token ids of evenly spaced sequences, about `TOKENS` in all, or of the whole store
    if it has fewer."""
    lengths = store.all_lengths()
    count = max(1, round(TOKENS / max(1.0, float(lengths.mean()))))
    for number in spread(len(lengths), count):
        yield torch.from_numpy(np.asarray(store[number].token_ids, np.int64))
