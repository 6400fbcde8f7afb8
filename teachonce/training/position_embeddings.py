"""What a teacher's config.json says of its position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teachonce.support.errors import UserError

UNBOUND = 1_000_000  # tokens; a tokenizer without a bound tells 10**30
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
    that of the padding id, and the rows up to there are no positions. Raises UserError for a
    padding id that is none."""
    kind = str(config.get("model_type"))
    if kind not in AFTER_PADDING:
        return 0
    padding = 1 if kind == "mpnet" else config.get("pad_token_id")  # MPNet's is fixed
    if not isinstance(padding, int) or padding < 0:
        raise UserError(
            f"the teacher's config.json: pad_token_id is {padding!r:.40}, expected the number of a"
            " piece"
        )
    return 1 + padding


def longest_input(tokens: Any, positions: Any, config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest input, special ones included, by `model_max_length` of a
    tokenizer and `max_position_embeddings` of a config; None where neither is a bound. Raises
    UserError as `first_position` does."""
    if isinstance(positions, int) and positions:
        positions -= first_position(config)
    known = [int(n) for n in (tokens, positions) if isinstance(n, int | float) and 0 < n < UNBOUND]
    return min(known, default=None)
