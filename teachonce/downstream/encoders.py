"""Loads a checkpoint with a fresh head or its own, and tells what its size decides."""

from __future__ import annotations

from typing import Any

import torch

from teachonce.store import TaskSpec
from teachonce.student_train.bilstm import (
    BiLstmConfig,  # importing it makes them known to the Auto classes
)
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.checkpoint_names import ResolvedModel
from teachonce.teacher_dump.teacher.loading import load_config, load_network, load_tokenizer
from teachonce.teacher_dump.teacher.networks import FACTORIES, load_with_head, task_of
from teachonce.training.position_embeddings import first_position

SMALL_WIDTH = 384


def load_with_fresh_head(
    model: ResolvedModel, factory: Any, head: dict[str, Any]
) -> tuple[Any, Any]:
    """Load tokenizer and network (float32) of a checkpoint with a new head, which `head` describes.

    factory: an AutoModelFor... of transformers.
    head: what the head needs in the model's config.

    Raises UserError where the checkpoint cannot be loaded, lacks weights of the encoder, or has no
    fast tokenizer that can pad.
    """
    config = load_config(model)
    config.update(head)
    tokenizer = _padding_tokenizer(model)
    network, _ = load_network(
        factory,
        model,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # a checkpoint that has a head of other labels
    )
    _match_inputs(tokenizer, network)
    return tokenizer, network


def load_with_own_head(model: ResolvedModel, factory: Any) -> tuple[Any, Any, TaskSpec]:
    """Load tokenizer, network (float32) and labels of a checkpoint that has the head of `factory`.

    Raises UserError as `load_with_fresh_head` does, and where the checkpoint has no such head or
    two labels of one name.
    """
    (kind,) = (kind for kind, each in FACTORIES.items() if each is factory)
    config = load_config(model)
    tokenizer = _padding_tokenizer(model)
    network, _ = load_with_head(model, config, kind, {"dtype": torch.float32})
    _match_inputs(tokenizer, network)
    task = task_of(network, kind, model.name)
    assert task is not None  # as it is for LM heads alone
    return tokenizer, network, task


def load_encoder(model: ResolvedModel) -> tuple[Any, Any]:
    """Load tokenizer and network (float32) of a checkpoint, without any head.

    Raises UserError as `load_with_fresh_head` does.
    """
    config = load_config(model)
    tokenizer = _padding_tokenizer(model)
    network, _ = load_with_head(model, config, "none", {"dtype": torch.float32})
    _match_inputs(tokenizer, network)
    return tokenizer, network


def _padding_tokenizer(model: ResolvedModel) -> Any:
    tokenizer = load_tokenizer(model)
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        lack = "has no padding token" if tokenizer.is_fast else "is no fast one"
        raise UserError(f"model {model.name}: its tokenizer {lack}; choose an encoder such as BERT")
    return tokenizer


def _match_inputs(tokenizer: Any, network: Any) -> None:
    """Make the tokenizer leave out inputs that the network does not read."""
    if (getattr(network.config, "type_vocab_size", None) or 0) < 2:  # no type for a second text
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = names


def default_lr(model: Any) -> float:
    """Choose the learning rate of a model that is fine-tuned.

    It is 5e-5 as for BERT (Devlin et al. 2019), 5e-4 for encoders less than 384 wide, and 3e-3 for
    BiLSTMs. The narrower a model, the larger the best rate of Adam (Yang et al. 2022). With BERT's
    rate a small student has hardly begun to learn when the epochs are over: a model 128 wide has,
    after 3 epochs of 1,500 sentences, an accuracy of 0.42 on English parts of speech; with 5e-4 it
    has 0.77. Untrained BiLSTMs of 100 and 300 units each way have 0.80 and 0.87 with 1e-3, 0.88 and
    0.90 with 3e-3.
    """
    if isinstance(model.config, BiLstmConfig):
        return 3e-3
    return 5e-4 if model.config.hidden_size < SMALL_WIDTH else 5e-5


def longest_input(config: Any, tokenizer: Any) -> int:
    """Return the number of tokens that a model takes at most, special ones included."""
    limit = int(tokenizer.model_max_length)
    positions = getattr(config, "max_position_embeddings", None)
    return min(limit, positions - first_position(config.to_dict())) if positions else limit
