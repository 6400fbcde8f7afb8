"""Static students: an embedding for each word piece, without layers. A text's vector is their mean.

Model2Vec distils such models by averaging; these are trained from a store. The weights have the
names of sentence-transformers' `StaticEmbedding`, so that both libraries load the same file.
Importing this module registers the model with the Auto classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class StaticConfig(PreTrainedConfig):
    """Sizes of a static student. `special_ids` are pieces that are left out of the mean, such as
    [CLS]."""

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
    """A table of word-piece embeddings, which are its hidden states [B,S,D]."""

    config_class = StaticConfig
    base_model_prefix = "static"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding = value

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Look up the embeddings of pieces [B,S]."""
        states = self.embedding(input_ids)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))


AutoConfig.register(StaticConfig.model_type, StaticConfig, exist_ok=True)
AutoModel.register(StaticConfig, StaticModel, exist_ok=True)
