"""Describes, for the store itself, what was dumped and by which software."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.teacher import Teacher


@dataclass(frozen=True)
class StageOne:
    """The result of a mixed-vocabulary training, its arguments as JSON, and the identity of the
    corpus where it was trained just now."""

    vocab: MixedVocab
    arguments: dict[str, Any]
    corpus: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return the arguments and hashes of the result, which a GPU need not give twice."""
        return {
            **self.arguments,
            "tokenizer_hash": hashlib.sha256(self.vocab.tokenizer).hexdigest(),
            "embeddings_hash": hashlib.sha256(self.vocab.embeddings.tobytes()).hexdigest(),
        }


def identity(
    options: DumpOptions,
    teacher: Teacher,
    corpus: Corpus,
    files: dict[str, bytes],
    max_length: int,
    stage_one: StageOne | None = None,
    grown_from: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the attribute `identity`: stores that share it and their features are equal.

    `grown_from` tells of the store whose parts were taken over, if there was one.
    """
    grown = {"grown_from": grown_from} if grown_from else {}
    kept = (
        "seed",
        "views",
        "mask_prob",
        "stride",
        "batch_tokens",
        "part_tokens",
        "precision",
        "limit",
        "weights",
    )
    arguments = {name: getattr(options, name) for name in kept}
    student = {"mixed_vocab": stage_one.identity()} if stage_one else {}
    return {
        "teacher": {
            "id": teacher.name,
            "revision": teacher.revision,
            "architecture": type(teacher.model).__name__,
            "weights_hash": teacher.weights_hash(),
            "config_hash": hashlib.sha256(files["config.json"]).hexdigest(),
        },
        "tokenizer_hash": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
        "corpus": corpus.identity() | grown,
        "arguments": {
            **arguments,
            "max_length": max_length,
            "device": torch.device(options.device).type,
            **({"mask_words": options.mask_words} if options.mask_words != "uniform" else {}),
            **({"remote_code": True} if options.trust_remote_code else {}),
            **{k: v for k in ("pooling", "prompt") if (v := getattr(options, k)) is not None},
        },
        **student,
    }
