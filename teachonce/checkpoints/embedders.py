"""Embeds texts and scores pairs with models loaded by sentence-transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from teachonce.checkpoints.declared import config_of, declared_head
from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.loading import load_config, without_log_lines
from teachonce.checkpoints.names import ResolvedModel, finder, resolve_vectors
from teachonce.checkpoints.sentence_folder import check_modules, module_kinds
from teachonce.checkpoints.sentence_settings import check_similarity
from teachonce.checkpoints.static import static_module
from teachonce.checkpoints.unreadable import folder_errors
from teachonce.support.arrays import Floats
from teachonce.support.console import counted
from teachonce.support.errors import UserError

BATCH = 1000  # texts that are tokenized at once to count tokens
ENCODED = 32  # texts that a transformer embeds at once, the library's default
WITHOUT_LAYERS = 1024
"""Texts that a static model embeds at once: it pads nothing, and batches of 32 take 1.6 times the
time."""


class TruncationCount:
    """Counts texts, or pairs of texts, that a model truncates."""

    def __init__(self) -> None:
        self.read = self.cut = 0
        self._limit = 0

    def add(self, model: Any, texts: Sequence[Any]) -> None:
        """Count the texts of a call of a sentence-transformers model."""
        limit, tokenizer = model.max_seq_length, getattr(model, "tokenizer", None)
        self.read += len(texts)
        if isinstance(tokenizer, Tokenizer):  # of a static model
            limit = (tokenizer.truncation or {}).get("max_length")
        elif not callable(tokenizer):
            return
        if not isinstance(limit, int):
            return
        self._limit = limit
        # Only long texts are tokenized: a token has at least one byte, and a pair up to four
        # special tokens, so shorter texts fit.
        long = [text for text in texts if len("".join(text).encode()) + 4 > limit]
        for begin in range(0, len(long), BATCH):
            batch = long[begin : begin + BATCH]
            if isinstance(tokenizer, Tokenizer):
                encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
                self.cut += sum(bool(encoding.overflowing) for encoding in encodings)
            else:
                ids = tokenizer(batch, truncation=False, verbose=False)["input_ids"]
                self.cut += sum(len(sequence) > limit for sequence in ids)

    def note(self) -> str | None:
        """Return a line with the number of truncated texts; None if there are none."""
        if not self.cut:
            return None
        texts, tokens = counted(self.read, "text"), counted(self._limit, "token")
        return f"{self.cut:,} of {texts} cut to {tokens}"


def _prompt(model: Any, role: str | None) -> str:
    """Return the prompt that a model puts before texts of a `role`: "query", "document", or None
    for other texts."""
    # The names that the library's `encode_document` tries, in its order.
    names = {"document": ("document", "passage", "corpus")}.get(role or "", (role,))
    prompts = model.prompts or {}
    prompt_name = next((name for name in names if name in prompts), model.default_prompt_name)
    return prompts.get(prompt_name) or ""


class Embedder:
    """Embeds texts: with the modules of a sentence-transformers folder, else with the mean of an
    encoder's last hidden states.

    max_length: truncate texts to this number of tokens; None for the folder's setting.

    Raises UserError if the model cannot be loaded, or if its similarity is a distance.
    """

    def __init__(self, name: str, max_length: int | None = None) -> None:
        self.name = name
        resolved = resolve_vectors(name)
        check_modules(resolved)
        self.batch = WITHOUT_LAYERS if static_module(resolved) is not None else ENCODED
        self.model = _load("SentenceTransformer", resolved, max_length)
        if self.model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(
                f"model {name}: its texts are compared by {self.model.similarity_fn_name}"
                " (config_sentence_transformers.json), expected cosine or dot"
            )
        self.cuts = TruncationCount()

    def vectors(self, texts: Sequence[str], role: str | None = None) -> Floats:
        """Embed texts as float32 [N,W]; dot products of the vectors are similarities.

        role: "query" or "document", for the model's prompt; None for other texts.
        """
        encode = getattr(self.model, f"encode_{role}" if role else "encode")
        cosine = self.model.similarity_fn_name == "cosine"
        prompt = _prompt(self.model, role)
        self.cuts.add(self.model, [prompt + text for text in texts])
        vectors = encode(
            list(texts),
            batch_size=self.batch,
            normalize_embeddings=cosine,
            show_progress_bar=False,
        )
        vectors = np.asarray(vectors, np.float32)
        return _finite(vectors, self.name)

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class PairScorer:
    """Scores pairs of texts with a CrossEncoder that has one output.

    max_length: truncate a pair to this number of tokens; None for the model's limit.

    Raises UserError if the model cannot be loaded or has another number of outputs.
    """

    def __init__(self, name: str, max_length: int | None = None) -> None:
        self.name = name
        self.model = _load("CrossEncoder", resolve_vectors(name), max_length)
        if self.model.num_labels != 1:
            raise UserError(
                f"model {name}: has {self.model.num_labels} outputs for a pair, expected one score;"
                " give a reranker, or an embedding model"
            )
        self.cuts = TruncationCount()

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Floats:
        """Score pairs as float32 [N]; larger is more similar."""
        self.cuts.add(self.model, list(pairs))
        scores = self.model.predict(list(pairs), show_progress_bar=False)
        return _finite(np.asarray(scores, np.float32).reshape(-1), self.name)


def _finite(values: Floats, name: str) -> Floats:
    """Return vectors or scores. Raises UserError for NaN and infinity."""
    # NaN sorts anywhere, so that a ranking would still have a score.
    if not np.isfinite(values).all():
        raise UserError(
            f"model {name}: gives NaN or infinity, so its weights are damaged; train it again"
        )
    return values


def reads_pairs(name: str) -> bool:
    """Return whether a model has a classification head, so that it reads a pair as one input."""
    resolved = resolve_vectors(name)
    if finder(resolved)("config.json") is None:  # a folder without a transformer
        return False
    return declared_head(load_config(resolved).architectures or ()) == "classification"


def _load(kind: str, resolved: ResolvedModel, max_length: int | None) -> Any:
    """Load a model with a class of sentence-transformers, in float32, without log lines."""
    import sentence_transformers

    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    root = replace(resolved, path_or_id=resolved.root or resolved.path_or_id)
    check_similarity(resolved.name, config_of(root, SETTINGS).get("similarity_fn_name"))
    if module_kinds(resolved)[:1] in ([], ["Transformer"]):
        load_config(resolved)  # raises for fields that the library would silently ignore
    problem = f"model {resolved.name}: sentence-transformers cannot load it"
    with folder_errors(problem), without_log_lines():
        factory = getattr(sentence_transformers, kind)
        # The root has modules.json; the transformer may be in a subfolder.
        model = factory(root.path_or_id, revision=resolved.revision)
    tokenizer = getattr(model, "tokenizer", None)
    if max_length and isinstance(tokenizer, Tokenizer):  # of a static model
        old = tokenizer.truncation or {"max_length": max_length}
        tokenizer.enable_truncation(**old | {"max_length": min(max_length, old["max_length"])})
    elif max_length:
        limit = model.max_seq_length
        model.max_seq_length = min(max_length, limit or max_length)
    # In float16 the 1e-12 of torch's normalize is 0, so an empty text's vector would be 0 / 0.
    return model.float()
