"""What the config.json of a checkpoint declares: its head, its layers, its position embeddings.

Only JSON is read; torch and transformers are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from teachonce.checkpoints.names import ResolvedModel, finder
from teachonce.support.errors import UserError

WITHOUT = "keep hidden states and attention maps alone (`teacher-dump --head none`)"


@dataclass(frozen=True)
class Declared:
    """A head: its name, how to get one, and the end of the names of the transformers classes that
    have it, which tells heads apart whose parameters have the same names."""

    name: str
    remedy: str
    architecture: str | None = None


DECLARED = {
    "mlm": Declared("masked-LM", f"train one with `downstream --task mlm`, or {WITHOUT}"),
    "causal": Declared("causal-LM", WITHOUT),
    "classification": Declared(
        "classification",
        "fine-tune it first with `downstream --task classify`",
        "ForSequenceClassification",
    ),
    "tagging": Declared(
        "tagging",
        "fine-tune it first with `downstream --task pos` or `ner`",
        "ForTokenClassification",
    ),
}


def declared_head(architectures: Sequence[str]) -> str | None:
    """Return the key in DECLARED of the first class whose name has the head of a task; None for
    other classes."""
    for name in architectures:
        for kind, head in DECLARED.items():
            if head.architecture and name.endswith(head.architecture):
                return kind
    return None


def config_of(model: ResolvedModel, name: str = "config.json") -> dict[str, Any]:
    """Read a table of settings next to the config.json of a checkpoint; {} if it cannot be read:
    loading reports that."""
    try:
        path = finder(replace(model, root=None))(name)
        found = json.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_declared(model: ResolvedModel, config: Mapping[str, Any], head: str) -> None:
    """Raise UserError if the checkpoint has, by its config, another head than `head` of
    DECLARED."""
    said = config.get("architectures")
    if isinstance(said, list) and (other := another_head([*map(str, said)], head)):
        raise no_head(model.name, head, [other])


def another_head(architectures: Sequence[str], head: str) -> str:
    """Return a line with the class of a checkpoint if that has another head; "" if it may have
    this one."""
    end = DECLARED[head].architecture
    if end is None or not architectures or any(name.endswith(end) for name in architectures):
        return ""
    return f"it is a {architectures[0]}"


def no_head(model: str, head: str, missing: Sequence[str]) -> UserError:
    """Make the error for a head that a checkpoint lacks; `missing` are its parameters, or why."""
    told = f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
    about = DECLARED[head]
    return UserError(
        f"{model}: the checkpoint has no {about.name} head (missing: {told}); {about.remedy}"
    )


LAYERS = ("num_hidden_layers", "n_layers", "n_layer")  # in BERT, DistilBERT, GPT-2


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None if the config does not have it."""
    return next((config[name] for name in LAYERS if isinstance(config.get(name), int)), None)


UNBOUND = 1_000_000  # tokens; a tokenizer without a bound has 10**30
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
