"""Loads checkpoints through transformers, and tells in one line what is missing or damaged."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.teacher_dump.teacher.checkpoint_names import ResolvedModel
from teachonce.training.tokenizer_folder import why_unloadable


def load(factory: Any, model: ResolvedModel, **options: Any) -> Any:
    """Call `factory.from_pretrained` silently, for the commit that was resolved.

    Raises UserError for whatever keeps transformers from reading it, but for a lack of memory.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # this package checks what it would warn about
    logging.disable_progress_bar()
    try:
        return factory.from_pretrained(
            model.path_or_id,
            revision=model.revision or "main",
            trust_remote_code=model.trusted,
            **options,
        )
    except Exception as error:  # libraries raise errors of any kind for a bad file
        if out_of_memory(error):
            raise
        if not model.trusted and "trust_remote_code" in str(error):
            raise UserError(
                f"model {model.name}: brings Python code of its own, which is not run; read it,"
                " then give --trust-remote-code to teacher-dump"
            ) from error
        is_tokenizer = factory is AutoTokenizer
        why = why_unloadable(model.path_or_id, error) if is_tokenizer else first_line(error)
        raise UserError(
            f"model {model.name}: cannot be loaded: {why}; give a folder that save_pretrained wrote"
            + (", with its tokenizer" if is_tokenizer else "")
        ) from error
    finally:
        logging.set_verbosity(level)


def load_config(model: ResolvedModel) -> Any:
    """Load the configuration. Raises UserError for an encoder-decoder."""
    config = load(AutoConfig, model)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model {model.name}: an encoder-decoder ({config.model_type}), whose tokens are not"
            " those of the text it reads; choose an encoder such as BERT"
        )
    return config


def load_tokenizer(model: ResolvedModel) -> Any:
    """Load the tokenizer. Raises UserError where it has no pieces.

    For a folder without tokenizer files transformers makes one that knows only special tokens.
    """
    tokenizer = load(AutoTokenizer, model)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model {model.name}: its tokenizer has special tokens only, as tokenizer.json or the"
            " vocabulary is missing or empty; copy the whole checkpoint, tokenizer and all"
        )
    return tokenizer


def load_network(factory: Any, model: ResolvedModel, **options: Any) -> tuple[Any, list[str]]:
    """Load a network; returns it, and the parameters of head and pooler that the checkpoint lacks.

    These hold random numbers. Raises UserError if the checkpoint lacks parameters of the encoder,
    or has them in another size.
    """
    network, report = load(factory, model, output_loading_info=True, **options)
    other_sizes = {key for key, *_ in report["mismatched_keys"]}
    missing = sorted(k for k in report["missing_keys"] | other_sizes if "position_ids" not in k)
    prefix = "" if network.base_model is network else f"{network.base_model_prefix}."
    encoder = [key for key in missing if key.startswith(prefix) and "pooler" not in key]
    if encoder:
        raise UserError(
            f"model {model.name}: the checkpoint lacks weights of its encoder, {len(encoder)},"
            f" first {encoder[0]}; copy the whole checkpoint"
        )
    return network, missing
