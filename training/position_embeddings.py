"""What a teacher's config.json says of its position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""RoBERTa and its kin, by `model_type` of transformers."""


def first_position(config: Mapping[str, Any]) -> int:
    """Row of the position embeddings that the first token takes: in some families it comes behind
    that of the padding id, and the rows up to there are no positions."""
    kind = config["model_type"]
    if kind not in AFTER_PADDING:
        return 0
    return 1 + (1 if kind == "mpnet" else int(config["pad_token_id"]))  # MPNet's is fixed
