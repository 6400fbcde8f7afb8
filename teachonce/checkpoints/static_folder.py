"""Loads static teachers: tables of word vectors, such as Model2Vec's, in sentence-transformers
folders."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from teachonce.checkpoints.fields import STATIC
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.sentence_settings import listed_modules
from teachonce.checkpoints.static import StaticConfig, StaticModel
from teachonce.support.errors import UserError, first_line, out_of_memory

UNBOUND = 10**30  # `model_max_length` of a tokenizer without a limit


def static_module(model: ResolvedModel) -> str | None:
    """Return the subfolder of the table of word vectors if this is the first module; else None."""
    listed = listed_modules(model) or []
    return listed[0][1] if listed and listed[0][0] == STATIC else None


def load_static(model: ResolvedModel, subfolder: str) -> tuple[StaticModel, Any]:
    """Load the word vectors (float32) and the tokenizer, which adds no special tokens.

    Raises UserError if the folder is damaged.
    """
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    root = model.root or model.path_or_id
    try:
        found = StaticEmbedding.load(root, subfolder=subfolder, revision=model.revision)
    except Exception as error:  # JSON, safetensors and tokenizers raise their own errors
        if out_of_memory(error):
            raise
        raise UserError(
            f"model {model.name}: sentence-transformers cannot load its {STATIC}:"
            f" {first_line(error)}; copy the whole folder"
        ) from error
    vectors = found.embedding.weight.detach().float()
    if vectors.dim() != 2:
        raise UserError(
            f"model {model.name}: its word vectors have shape {list(vectors.shape)}, expected a"
            " table; copy the whole folder"
        )
    rows, width = vectors.shape
    network = StaticModel(StaticConfig(vocab_size=rows, hidden_size=width, pad_token_id=None))
    with torch.no_grad():
        network.embedding.weight.copy_(vectors)
    backend = found.tokenizer
    backend.post_processor = None  # StaticEmbedding encodes without special tokens
    return network, PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=UNBOUND)
