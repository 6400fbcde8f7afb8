"""Static models: an embedding for each word piece, without layers. A text's vector is their mean.

Students are trained from a store; teachers, such as Model2Vec's, are sentence-transformers folders.
The weights have the names of sentence-transformers' `StaticEmbedding`, so that both libraries load
the same file. Importing this module registers the model with the Auto classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput

from teachonce.checkpoints.fields import STATIC
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.sentence_settings import listed_modules
from teachonce.checkpoints.unreadable import folder_errors
from teachonce.support.errors import UserError


class StaticConfig(PreTrainedConfig):
    """Holds the sizes of a static student. `special_ids` are pieces that are left out of the mean,
    such as [CLS]."""

    model_type = "static"

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 256,
        special_ids: Sequence[int] = (),
        pad_token_id: int | None = 0,
        initializer_range: float = 0.02,
        **common: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = 0
        self.special_ids = list(special_ids)
        self.pad_token_id = pad_token_id
        self.initializer_range = initializer_range
        # Else the base class would set it to the value in a file.
        common.pop("num_hidden_layers", None)
        super().__init__(**common)


class StaticModel(PreTrainedModel):
    """Looks up word-piece embeddings in a table, which are its hidden states [B,S,D]."""

    config_class = StaticConfig
    base_model_prefix = "static"
    _input_embed_layer = "embedding"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Look up the embeddings of pieces [B,S]."""
        states = self.embedding(input_ids)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))


AutoConfig.register(StaticConfig.model_type, StaticConfig, exist_ok=True)
AutoModel.register(StaticConfig, StaticModel, exist_ok=True)


def static_module(model: ResolvedModel) -> str | None:
    """Return the subfolder of the table of word vectors if this table is the first module of the
    sentence-transformers folder; else None."""
    listed = listed_modules(model) or []
    return listed[0][1] if listed and listed[0][0] == STATIC else None


def load_static(model: ResolvedModel, subfolder: str) -> tuple[StaticModel, Any]:
    """Load the word vectors (float32) and the tokenizer, which adds no special tokens.

    Raises UserError if the folder is damaged.
    """
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    root = model.root or model.path_or_id
    with folder_errors(f"model {model.name}: sentence-transformers cannot load its {STATIC}"):
        module = StaticEmbedding.load(root, subfolder=subfolder, revision=model.revision)
    vectors = module.embedding.weight.detach().float()
    if vectors.dim() != 2:
        raise UserError(
            f"model {model.name}: its word vectors have shape {list(vectors.shape)}, expected two"
            " dimensions; copy the whole folder"
        )
    rows, width = vectors.shape
    network = StaticModel(StaticConfig(vocab_size=rows, hidden_size=width, pad_token_id=None))
    with torch.no_grad():
        network.embedding.weight.copy_(vectors)
    backend = module.tokenizer
    backend.post_processor = None  # StaticEmbedding encodes without special tokens
    # None is no limit.
    longest = longest_text(backend)
    return network, PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=longest)


def longest_text(backend: Tokenizer) -> int | None:
    """Return the number of tokens to which a StaticEmbedding truncates a text; None for no limit.

    StaticEmbedding has no setting for it, but encodes with the truncation in tokenizer.json. If the
    table was made from a transformer, its tokenizer often has a truncation.
    """
    length = (backend.truncation or {}).get("max_length")
    return None if length is None else int(length)
