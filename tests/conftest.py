"""Shared fixtures: real tokenizers trained here and small real teachers with a masked-LM head.

Nothing is downloaded. Heavy imports stay inside the fixtures, so that the tests of `store` and
`align` start fast.

- `make_tokenizer(kind)`: kind in TOKENIZER_KINDS -> PreTrainedTokenizerFast
- `tiny_teacher(kind)`: kind in TEACHER_KINDS -> Path of a transformers folder (float32);
  `tiny_teacher(kind, "classification", labels)` or `"tagging"`: with such a head instead;
  `tiny_teacher("gpt2")`: a causal one
"""

from __future__ import annotations

import gc
import math
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TEACHONCE_CACHE"] = tempfile.mkdtemp(prefix="teachonce-cache-")
os.environ["HF_DATASETS_CACHE"] = os.environ["TEACHONCE_CACHE"] + "/datasets"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the commands have it
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: more threads would only wait
    os.environ["OMP_NUM_THREADS"] = "1"

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.texts import SENTENCES

# Collecting the tests makes 700,000 objects that stay; a third of its time was the search for some
# that could be freed.
gc.disable()

settings.register_profile("untimed", deadline=None)  # a first example may train a tokenizer
settings.load_profile("untimed")

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
    """A trained `tokenizers.Tokenizer` that adds its cls and sep to every text."""
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
    """The pieces with the logarithms of their counts: the trainer's sums differ between processes,
    and the ids with them."""
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
    """Not by the library's own trainer, which gives other pieces in every process."""
    from tokenizers import normalizers

    from teachonce.student_train.model.student_tokenizer import train_wordpiece

    normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer = train_wordpiece(SENTENCES, VOCABULARY, normalizer)
    tokenizer.model_max_length = MAX_LENGTH
    return tokenizer


@cache
def _tokenizer(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    if kind.startswith("wordpiece"):
        return _wordpiece(kind == "wordpiece-lower")
    if kind == "bpe-plain":  # what causal models read: no token around a text, none for padding
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


def _model(kind: str, tokenizer: Any, head: str = "mlm", labels: tuple[str, ...] = ()) -> Any:
    """A random model of 4 layers, 32 wide, 4 heads, with a head."""
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "initializer_range": 0.2,  # wide enough that logits and maps are far from uniform
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
    prefix, own = settings[kind]
    config = getattr(transformers, f"{prefix}Config")(**common, **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed([*TEACHER_KINDS, "gpt2"].index(kind))
        model = getattr(transformers, prefix + HEADS[head])(config)
    return model.float().eval()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would all that is tested there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], Any]:
    """`make_tokenizer(kind)` -> a PreTrainedTokenizerFast, shared by the session."""
    return _tokenizer


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_teacher(kind)` -> folder of a random teacher and its tokenizer, saved once."""
    root = tmp_path_factory.mktemp("teachers")

    @cache
    def saved(kind: str, head: str | None = None, labels: tuple[str, ...] = ()) -> Path:
        tokenizer = _tokenizer(TOKENIZER_OF[kind])
        folder = root / "-".join([kind, *([head] if head else []), *labels])
        head = head or ("causal" if kind == "gpt2" else "mlm")
        _model(kind, tokenizer, head, labels).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return saved
