"""Reads the sizes of a decoder from its config, and checks whether a student can be cut out of a
teacher. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from teachonce.checkpoints.declared import layers_of
from teachonce.student_train.settings.shapes import Shape, parse_student
from teachonce.support.errors import UserError

SCALED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The settings that rotary positions of the type llama3 have in addition to their base."""
EPSILONS = {
    "gpt2": "layer_norm_epsilon",
    **dict.fromkeys(("llama", "qwen2", "qwen3"), "rms_norm_eps"),
}
"""The name of the norms' epsilon, by the kinds of students whose layers can be copied."""

UNREAD_BY_GPT2 = ("num_key_value_heads", "head_dim", "intermediate_size")
"""Sizes of other kinds: transformers ignores them in the config.json of a GPT-2."""
OF_LAYERS = {
    "attention_bias": False,
    "mlp_bias": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_sliding_window": False,
}
"""Settings of a config.json, and the values that the layers of every decoder student have."""


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a decoder.

    width: the hidden size. heads, groups: the numbers of query heads and of key-value heads.
        head_size: the size of a head. units: the feed-forward size.
    """

    width: int
    heads: int
    groups: int
    head_size: int
    units: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str) -> Sizes:
        """Read the sizes in a config.json. Raises UserError for a size that is not a number above
        0; `where` names the model in messages."""
        unread = UNREAD_BY_GPT2 if config.get("model_type") == "gpt2" else ()

        def size(*names: str, default: int = 0) -> int:
            # Null is as good as missing: GPT-2's `n_inner` is null for four times the hidden size.
            value = next(
                (config[n] for n in names if config.get(n) is not None and n not in unread), default
            )
            if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
                value = max(value)  # one for each layer, as in Gemma 3n
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{where}: {names[0]} in its config.json is {value!r:.40}, expected a number of"
                    " at least 1; correct it"
                )
            return value

        width = size("hidden_size", "n_embd")
        heads = size("num_attention_heads", "n_head")
        return cls(
            width,
            heads,
            size("num_key_value_heads", default=heads),
            size("head_dim", default=width // heads),
            size("intermediate_size", "n_inner", default=4 * width),
        )

    @classmethod
    def of_loaded(cls, config: Any) -> Sizes:
        """Read the sizes in a config of transformers, whose attributes have common names in all
        families. Raises UserError as `of_config` does."""
        names = ("model_type", "hidden_size", "num_attention_heads", "n_inner", *UNREAD_BY_GPT2)
        sizes = {n: getattr(config, n, None) for n in names}
        return cls.of_config(sizes, config.name_or_path or f"the {config.model_type}")

    @property
    def layer_weights(self) -> int:
        """Count the weights of a layer, with a gated feed-forward network."""
        attention = 2 * (self.heads + self.groups) * self.head_size
        return self.width * (attention + 3 * self.units)

    @property
    def fill_width(self) -> bool:
        """Return whether heads times head size is the hidden size, the default of a shape."""
        return self.heads * self.head_size == self.width

    def shape(self, kind: str, layers: int, grouped: bool) -> str:
        """Return the value of `--student` for a decoder of these sizes.

        grouped: whether to write the number of key-value heads even if no size of a head follows
            it.
        """
        size = f"{kind}:{self.width}x{layers}x{self.heads}x{self.units}"
        grouped = grouped and kind != "gpt2"  # in a GPT-2 each head has its own keys and values
        size += f"x{self.groups}" if grouped or not self.fill_width else ""
        return size if self.fill_width else f"{size}x{self.head_size}"


def check_cut(how: str, shape: Shape, config: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless a decoder of `shape` can be cut out of the model with this config.

    how: the value of `--init`. where: the model, for messages.
    """
    kind, start = str(config.get("model_type")), f"--init {how}"
    if kind != shape.kind or kind not in EPSILONS:
        kinds = ", ".join(EPSILONS)
        remedy = f"give --student {kind}:..., or --init vocab" if kind in EPSILONS else ""
        raise UserError(
            f"{start}: {where} is a {kind:.40} and the student a {shape.kind}; layers are copied"
            f" only between models of the same kind ({kinds}): {remedy or 'use --init vocab'}"
        )
    teacher = Sizes.of_config(config, where)
    groups, head_size = shape.key_value_heads, shape.head_size
    student = Sizes(shape.width, shape.heads, groups, head_size, shape.feed_forward)
    if student.head_size != teacher.head_size:
        # A shape of GPT-2 has no size of heads.
        fitting = f"{kind}:HxLxAxFxKVx{teacher.head_size}, or " if kind != "gpt2" else ""
        raise UserError(
            f"{start}: the heads of {where} have size {teacher.head_size}, the student's"
            f" {student.head_size}, and heads are copied whole; choose --student"
            f" {fitting}{kind}:HxLxA"
            f" with H = {teacher.head_size} A"
        )
    form, grouped = f"{kind}:HxLxAxF", f"{kind}:HxLxAxFxKV"
    if not student.fill_width:
        form = grouped = f"{grouped}x{student.head_size}"
    for label, letter, size, limit in (
        ("hidden size", "H", student.width, teacher.width),
        ("feed-forward size", "F", student.units, teacher.units),
        ("number of heads", "A", student.heads, teacher.heads),
    ):
        if size > limit:
            raise UserError(
                f"{start}: the student's {label} is {size}, and {where} has {limit}; choose"
                f" --student {form} with {letter} = {limit} or less"
            )
    sets = head_sets(teacher, student)
    if student.groups > sets:
        raise UserError(
            f"{start}: {student.heads // student.groups} query heads share a key-value head in the"
            f" student, and {teacher.heads // teacher.groups} in {where}, which has"
            f" {teacher.groups}: choose --student {grouped} with another KV, such as"
            f" {sets or student.heads}"
        )
    _check_layers(config, where, start)
    copied_settings(config)


def shape_of_folder(config: Mapping[str, Any], folder: str, option: str) -> str:
    """Return the shape of the decoder in a folder as a value of `--student`.

    option: the option and its value, which name the folder in messages.

    Raises UserError for another kind of model, and for sizes that `--student` cannot express.
    """
    kind = str(config.get("model_type"))
    if kind not in EPSILONS or config.get("is_encoder_decoder"):
        raise UserError(
            f"{option}: the model in this folder is a {kind:.40}, and training can continue only"
            f" for decoders of the kinds {', '.join(EPSILONS)}; give another folder, or --student"
            " llama:256x4x4"
        )
    sizes, layers = Sizes.of_config(config, folder), layers_of(config) or 0
    _check_layers(config, folder, option)
    shape = sizes.shape(kind, layers, grouped=True)
    try:
        parse_student(shape, f"{option}, whose config.json has ")
    except UserError as error:  # its advice is for a shape that the user typed
        raise UserError(f"{error}; give another folder, or --student llama:256x4x4") from error
    return shape


def _check_layers(config: Mapping[str, Any], where: str, option: str) -> None:
    """Raise UserError for a model whose layers compute what a student's layers cannot."""
    for name, expected in OF_LAYERS.items():
        if name == "attention_bias" and config.get("model_type") == "qwen2":
            continue  # every Qwen2 has this bias
        if config.get(name) not in (None, expected):
            raise UserError(
                f"{option}: {name} in the config.json of {where} is {config[name]!r:.40}, and"
                f" layers of students have {expected}; give --student llama:256x4x4 --init vocab"
            )


def head_sets(teacher: Sizes, student: Sizes) -> int:
    """Count the sets of query heads among which `decoder_cut.chosen_heads` chooses. Each set has as
    many heads of the teacher as share a key-value head in the student."""
    return teacher.groups * ((teacher.heads // teacher.groups) // (student.heads // student.groups))


def copied_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a teacher's config that its layers depend on: activation, epsilon of
    the norms, rotary positions.

    Raises UserError for rotary positions of an unknown type or form.
    """
    kind = str(config.get("model_type"))
    act = "activation_function" if kind == "gpt2" else "hidden_act"
    names = {act: str, EPSILONS[kind]: float}
    settings: dict[str, Any] = {
        n: config[n] for n, of in names.items() if isinstance(config.get(n), of)
    }
    return settings if kind == "gpt2" else settings | {"rope_parameters": _rotary(config)}


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output embeddings of the model with this config.json are its word
    embeddings."""
    # config.json may omit a default: GPT-2's embeddings are tied by default, Llama's are not.
    return bool(config.get("tie_word_embeddings", config.get("model_type") == "gpt2"))


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of rotary positions from a config of transformers 4 or 5."""
    parameters, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for value in (parameters, scaling):
        if not isinstance(value, dict):
            raise UserError(
                f"--init: the rotary positions in the config.json of the copied decoder are"
                f" {value!r:.40}, expected an object; use --init vocab, which copies no layers"
            )
    rope = parameters or {"rope_theta": config.get("rope_theta"), **scaling}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    names = {"default": (), "llama3": SCALED}.get(kind)
    # The base of Llama's and Qwen's configs where none is given.
    base = rope.get("rope_theta") or 10000.0
    numbers = {name: rope.get(name) for name in names or ()} | {"rope_theta": base}
    if names is None or not all(isinstance(n, (int, float)) for n in numbers.values()):
        raise UserError(
            f"--init: the rotary positions of the copied decoder are of the type {kind:.40},"
            " expected default or llama3; use --init vocab, which copies no layers"
        )
    return {"rope_type": kind, **numbers}
