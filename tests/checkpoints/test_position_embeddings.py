"""The first position equals the one that the models of transformers look up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from teachonce.checkpoints.declared import AFTER_PADDING, first_position

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
    "pad_token_id": 5,
}
OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 6},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 2, "shape_size": 4},
    "lilt": {"hidden_size": 24, "channel_shrink_ratio": 1},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 8},
    "markuplm": {"max_depth": 2, "xpath_unit_hidden_size": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
FROM_ZERO = {"bert", "distilbert", "electra"}


@pytest.mark.parametrize("kind", sorted(AFTER_PADDING | FROM_ZERO))
def test_the_first_token_takes_the_row_that_the_model_looks_up(kind: str) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **OWN.get(kind, {})})
    model = AutoModel.from_config(config).eval()
    seen: list[torch.Tensor] = []
    table = model.get_submodule("embeddings.position_embeddings")
    table.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    first = first_position(config.to_dict())
    assert seen[0].reshape(-1)[:4].tolist() == list(range(first, first + 4))
    assert (first == 0) == (kind in FROM_ZERO)


@pytest.mark.parametrize("kind", ["camembert", "roberta", "xlm-roberta"])
def test_the_padding_id_of_a_config_without_one_is_that_of_transformers(kind: str) -> None:
    config = AutoConfig.for_model(kind).to_dict()
    assert config.pop("pad_token_id") == 1
    assert first_position(config) == 2
