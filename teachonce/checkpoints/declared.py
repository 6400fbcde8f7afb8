"""Reads from the config.json of a checkpoint its head, its layers and its position embeddings.

Only JSON is read; torch and transformers are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from teachonce.checkpoints.names import ResolvedModel, finder
from teachonce.support.errors import UserError

if TYPE_CHECKING:
    from teachonce.store import FeatureStore

WITHOUT = "store only hidden states and attention maps (`teacher-dump --head none`)"


@dataclass(frozen=True)
class DeclaredHead:
    """Describes a kind of head, and how to get a checkpoint that has it."""

    name: str
    remedy: str
    # The ends of the class names in transformers; they distinguish heads whose parameters have the
    # same names.
    architectures: tuple[str, ...]


RERANKER = "fine-tune it first with `downstream --task pair`"
"""How to get a classification head with one output, for `--head score`."""
MASKED = ("ForMaskedLM", "WithLMHeadModel")  # XLM and FlauBERT have the second name
DECLARED = {
    "mlm": DeclaredHead(
        "masked-LM", f"train one with `downstream --task mlm`, or {WITHOUT}", MASKED
    ),
    "causal": DeclaredHead("causal-LM", WITHOUT, ("ForCausalLM", "LMHeadModel")),
    "classification": DeclaredHead(
        "classification",
        "fine-tune it first with `downstream --task classify`",
        ("ForSequenceClassification",),
    ),
    "tagging": DeclaredHead(
        "tagging",
        "fine-tune it first with `downstream --task pos` or `ner`",
        ("ForTokenClassification",),
    ),
}


def declared_head(architectures: Sequence[str]) -> str | None:
    """Return the key in DECLARED of the first class that has a task head or causal-LM head; None if
    no class has one, as for a masked LM."""
    # A FlaubertWithLMHeadModel ends as a GPT2LMHeadModel does.
    for name in (name for name in architectures if not name.endswith(MASKED)):
        for kind, head in DECLARED.items():
            if name.endswith(head.architectures):
                return kind
    return None


def declared_kind(config: Mapping[str, Any]) -> str | None:
    """Return the key in DECLARED of the head that a checkpoint's config.json declares; None if it
    declares no head."""
    classes = config.get("architectures")
    # config.json may hold anything here; loading the checkpoint reports it.
    names = [*map(str, classes)] if isinstance(classes, list) else []
    masked = any(name.endswith(MASKED) for name in names)
    return declared_head(names) or ("mlm" if masked else None)


def config_of(model: ResolvedModel, name: str = "config.json") -> dict[str, Any]:
    """Read config.json, or another JSON file next to it; {} if it cannot be read."""
    # Loading the checkpoint reports a damaged file.
    try:
        # Next to the weights: with a `root`, `finder` would look in the sentence-transformers
        # folder.
        path = finder(replace(model, root=None))(name)
        content = json.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_declared(
    model: ResolvedModel, config: Mapping[str, Any], head: str, remedy: str = ""
) -> None:
    """Raise UserError if the config names a class with another head than `head`, a key of DECLARED.

    remedy: replaces the remedy of that entry. Raises UserError also for an encoder-decoder, for
    which no head is loaded.
    """
    check_no_encoder_decoder(model, config)
    classes = config.get("architectures")
    if isinstance(classes, list) and (other := another_head([*map(str, classes)], head)):
        if head == "mlm" and declared_kind(config) == "causal":
            remedy = remedy or "give --head causal (or auto): it is a decoder"
        raise no_head(model.name, head, [other], remedy)


def check_no_encoder_decoder(model: ResolvedModel, config: Mapping[str, Any]) -> None:
    """Raise UserError if the config describes an encoder-decoder."""
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"model {model.name}: is an encoder-decoder ({config.get('model_type')}), whose outputs"
            " do not belong to the tokens of its input; choose an encoder such as BERT,"
            " or a decoder such as Llama"
        )


def another_head(architectures: Sequence[str], head: str) -> str:
    """Return a phrase with the checkpoint's class if it has another head; else ""."""
    has_head = any(name.endswith(DECLARED[head].architectures) for name in architectures)
    if head == "mlm":  # classes of other names may have a masked-LM head, too
        has_head |= declared_head(architectures) is None
    return "" if has_head or not architectures else f"it is a {architectures[0]}"


def no_head(model: str, head: str, missing: Sequence[str], remedy: str = "") -> UserError:
    """Return the error for a head that a checkpoint lacks.

    missing: the missing parameters, or a reason. remedy: replaces the remedy in DECLARED.
    """
    shown = f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
    about = DECLARED[head]
    return UserError(
        f"{model}: the checkpoint has no {about.name} head (missing: {shown});"
        f" {remedy or about.remedy}"
    )


def has_full_attention(config: Any) -> bool:
    """Return whether all layers of a decoder attend to all earlier tokens, by its loaded config."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds == {"full_attention"} or not (kinds or getattr(config, "sliding_window", None))


# In BERT, DistilBERT, GPT-2, and GPT-Neo and XGLM.
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None if the config does not record it."""
    return next((config[name] for name in LAYERS if isinstance(config.get(name), int)), None)


# A larger limit counts as none: a tokenizer without a limit has a model_max_length of 10**30.
UNBOUND = 1_000_000  # tokens
# Families (`model_type`) in which the first token has the position padding id + 1, as in RoBERTa.
AFTER_PADDING = frozenset({
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke",
    "markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
})  # fmt: skip


OTHER_PADDING = {"lilt": 0, "markuplm": 0, "esm": None}
"""The padding id that transformers assumes if config.json has none; in other families it is 1."""


def first_position(config: Mapping[str, Any]) -> int:
    """Return the index of the first token's position embedding: 0, or in some families the index
    after the padding id. Raises UserError if the padding id is not a valid id."""
    kind = str(config.get("model_type"))
    if kind not in AFTER_PADDING:
        return 0
    # MPNet's code has the padding id 1 and ignores its config.
    padding = 1 if kind == "mpnet" else config.get("pad_token_id", OTHER_PADDING.get(kind, 1))
    if not isinstance(padding, int) or padding < 0:
        raise UserError(
            f"config.json: pad_token_id is {padding!r:.40}, expected the number of a piece"
        )
    return 1 + padding


def longest_input(tokens: Any, positions: Any, config: Mapping[str, Any]) -> int | None:
    """Return the longest input in tokens, special tokens included; None if it is unlimited.

    tokens: `model_max_length` of the tokenizer. positions: `max_position_embeddings` of the config.
    Raises UserError like `first_position`.
    """
    if isinstance(positions, int) and positions:
        positions -= first_position(config)
    limits = [int(n) for n in (tokens, positions) if isinstance(n, int | float) and 0 < n < UNBOUND]
    return min(limits, default=None)


def stored_config(store: FeatureStore) -> dict[str, Any]:
    """Return the config.json of a store's teacher; {} if the store lacks it, as a capture may."""
    stored = "config.json" in store.teacher_files()
    return store.teacher_settings("config.json") if stored else {}


def suggested_decoder(config: Mapping[str, Any]) -> str:
    """Return the shape of a small decoder, if possible of the teacher's kind and head size, so that
    `--init` can cut it out of the teacher.

    config: the teacher's config.json. For a kind that students cannot have, the shape is a Llama's.
    """
    width = config.get("hidden_size", config.get("n_embd"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    valid = isinstance(width, int) and isinstance(heads, int) and heads > 0
    size = config.get("head_dim") or (width // heads if valid else None)
    kind = config.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3", "gpt2"):
        return "llama:256x4x4"
    if size in (32, 64, 128):  # head sizes that divide the hidden size 256
        return f"{kind}:256x4x{256 // size}"
    # 680 is the feed-forward size that a shape of width 256 has by default.
    if kind != "gpt2" and isinstance(size, int) and 64 < size <= 256 and size % 2 == 0:
        heads = 2 if size <= 128 else 1
        return f"{kind}:256x4x{heads}x680x{heads}x{size}"
    return f"{kind}:256x4x4"
