"""Real tokenizers that are trained here, and small random models, for the fixtures of the tests.

Nothing is downloaded. Heavy imports are inside the functions, so that the tests of `store` and
`align` start fast.
"""

import copy
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.making.texts import SENTENCES

# The types of the fixtures `tiny_teacher`, `tiny_store` and `make_tokenizer`.
Teachers = Callable[..., Path]
Stores = Callable[..., Path]
Tokenizers = Callable[[str], Any]

TOKENIZER_KINDS = ("wordpiece", "wordpiece-lower", "bpe", "unigram")
TEACHER_KINDS = ("bert", "roberta", "deberta", "electra", "xlmr", "distilbert", "modernbert")
TOKENIZER_OF = {
    "bert": "wordpiece",
    "roberta": "bpe",
    "deberta": "unigram",
    "electra": "wordpiece-lower",
    "xlmr": "unigram",
    "distilbert": "wordpiece",
    "modernbert": "bpe",
    "gpt2": "bpe-plain",
}
HEADS = {
    "mlm": "ForMaskedLM",
    "classification": "ForSequenceClassification",
    "tagging": "ForTokenClassification",
    "causal": "LMHeadModel",
}
MAX_LENGTH = 128
VOCABULARY = 600


def _backend(kind: str, specials: dict[str, str]) -> Any:
    """Return a trained `tokenizers.Tokenizer` that adds its cls and sep to every text."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    unk = specials["unk_token"]
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "special_tokens": list(specials.values()),
        "show_progress": False,
    }
    if kind == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=unk, **common)
    else:
        raise ValueError(f"tokenizer kind {kind!r}: expected one of {TOKENIZER_KINDS}")
    backend.train_from_iterator(SENTENCES, trainer)
    if kind == "unigram":
        backend.model = models.Unigram(_counted(backend, list(specials.values())), unk_id=1)
    if "cls_token" not in specials:
        return backend
    cls, sep = specials["cls_token"], specials["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B {sep}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
    return backend


def _counted(backend: Any, specials: list[str]) -> list[tuple[str, float]]:
    """Return the pieces with the logarithms of their counts. The trainer's own scores differ
    between processes, and so would the ids."""
    marked = "".join(
        piece
        for text in SENTENCES
        for piece, _ in backend.pre_tokenizer.pre_tokenize_str(
            backend.normalizer.normalize_str(text)
        )
    )
    pieces = sorted(set(backend.get_vocab()) - set(specials))
    scores = [math.log((marked.count(piece) + 1) / len(marked)) for piece in pieces]
    return [*((special, 0.0) for special in specials), *zip(pieces, scores, strict=True)]


def _wordpiece(lower: bool) -> Any:
    """Train a WordPiece. The library's own trainer gives different pieces in every process."""
    from tokenizers import normalizers

    from teachonce.student_train.model.student_tokenizer import train_student_wordpiece

    normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer = train_student_wordpiece(SENTENCES, VOCABULARY, normalizer)
    tokenizer.model_max_length = MAX_LENGTH
    return tokenizer


def trained_tokenizer(kind: str) -> Any:
    """Return a copy for each caller: a call with `truncation=True` changes the tokenizer."""
    return copy.deepcopy(_trained_tokenizer(kind))


@cache
def _trained_tokenizer(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    if kind.startswith("wordpiece"):
        return _wordpiece(kind == "wordpiece-lower")
    # as for causal models: no special token around a text, no padding token
    if kind == "bpe-plain":
        return PreTrainedTokenizerFast(
            tokenizer_object=_backend("bpe", {"unk_token": "<|endoftext|>"}),
            unk_token="<|endoftext|>",
            model_max_length=MAX_LENGTH,
        )
    names = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    specials = dict(zip(roles, names, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(kind, specials), model_max_length=MAX_LENGTH, **specials
    )


def random_model(kind: str, tokenizer: Any, head: str, labels: tuple[str, ...] = ()) -> Any:
    """Return a random model with a head: 4 layers, hidden size 32, 4 attention heads."""
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "initializer_range": 0.2,  # large enough that logits and maps are far from uniform
    }
    if labels:
        common["id2label"] = dict(enumerate(labels))
        common["label2id"] = {label: number for number, label in enumerate(labels)}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_LENGTH,
    }
    shifted = {**sizes, "max_position_embeddings": MAX_LENGTH + 1 + (tokenizer.pad_token_id or 0)}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "bert": ("Bert", sizes),
        "roberta": ("Roberta", {**shifted, "type_vocab_size": 1}),
        "xlmr": ("XLMRoberta", {**shifted, "type_vocab_size": 1}),
        "electra": ("Electra", {**sizes, "embedding_size": 16}),
        "deberta": (
            "DebertaV2",
            {
                **sizes,
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_buckets": 16,
                "share_att_key": True,
                "norm_rel_ebd": "layer_norm",
            },
        ),
        "distilbert": (
            "DistilBert",
            {
                "dim": 32,
                "n_layers": 4,
                "n_heads": 4,
                "hidden_dim": 64,
                "max_position_embeddings": MAX_LENGTH,
            },
        ),
        "modernbert": (
            "ModernBert",
            {**sizes, "local_attention": 16, "global_attn_every_n_layers": 2},
        ),
        "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": MAX_LENGTH}),
    }
    if kind not in settings:
        raise ValueError(f"teacher kind {kind!r}: expected one of {', '.join(settings)}")
    prefix, family_config = settings[kind]
    config = getattr(transformers, f"{prefix}Config")(**common, **family_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed([*TEACHER_KINDS, "gpt2"].index(kind))
        model = getattr(transformers, prefix + HEADS[head])(config)
    return model.float().eval()
