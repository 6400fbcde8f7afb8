"""Compares the options of a dump with the config of its teacher, before the teacher is loaded."""

from __future__ import annotations

from teachonce.checkpoints.declared import (
    DECLARED,
    check_declared,
    config_of,
    layers_of,
    longest_input,
)
from teachonce.checkpoints.names import ResolvedModel
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.options import (
    DEFAULT_MAX_LENGTH,
    DumpOptions,
    check_length,
    parse_logits,
)
from teachonce.teacher_dump.teacher.layer_groups import layer_groups


def check_config(options: DumpOptions, model: ResolvedModel) -> None:
    """Raise UserError for layers, numbers of logits, a head and a length that the teacher does not
    have, as far as its config.json tells."""
    config = config_of(model)
    layers = layers_of(config)
    if layers is not None:
        layer_groups(options.hidden, layers, "--hidden ")
        layer_groups(options.attention, layers, "--attention ")
    pieces = config.get("vocab_size")
    if options.logits and isinstance(pieces, int):
        parse_logits(options.logits, 1, pieces)
    head = {"score": "classification"}.get(options.head, options.head)
    if head in DECLARED:
        check_declared(model, config, head)
    tokens = config_of(model, "tokenizer_config.json").get("model_max_length")
    longest = longest_input(tokens, config.get("max_position_embeddings"), config)
    check_length(options.max_length, longest)
    window = options.max_length or min(longest or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if options.stride >= window:
        raise UserError(f"--stride {options.stride}: expected less than --max-length {window}")
