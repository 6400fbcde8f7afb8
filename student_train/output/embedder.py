"""What a finished student that makes vectors of texts is saved with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from teachonce.checkpoints.sentence_folder import VectorHead, write_sentence_folder
from teachonce.store import FeatureStore
from teachonce.student_train.losses.registry import Term
from teachonce.student_train.plan.vector_space import similarity_of, vector_settings


def save_embedder(
    student: PreTrainedModel,
    head: VectorHead,
    terms: Sequence[Term],
    stores: Sequence[FeatureStore],
    longest: int,
    out: Path,
) -> int:
    """Save a student as a folder of sentence-transformers, and return its number of parameters.

    `longest` is the longest text in tokens. A masked-LM head is left out where no loss has trained
    it.
    """
    of_vocabulary = any(term.loss.head == "vocabulary" for term in terms)
    saved: Any = student if of_vocabulary else student.base_model
    saved.save_pretrained(out)
    static = student.config.model_type == "static"
    write_sentence_folder(out, head, max_length=longest, static=static, **settings_of(stores))
    return int(saved.num_parameters()) + sum(p.numel() for p in head.parameters())


def settings_of(stores: Sequence[FeatureStore]) -> dict[str, Any]:
    """Return what the student's folder has from its teachers: the prompts by name, which of them
    the student has read (the default, where it is one), and how texts are compared.

    A prompt without a name is called `default`.
    """
    prompts: dict[str, str] = {}
    read = {each.features.embedding.prompt for each in stores if each.features.embedding}
    for store in stores:
        prompts |= vector_settings(store).prompts
    found: dict[str, Any] = {"prompts": prompts, "similarity": similarity_of(stores)}
    if len(read) != 1 or not (text := read.pop()):
        return found
    names = [name for name, prompt in prompts.items() if prompt == text]
    name = names[0] if names else "default"
    return found | {"prompts": {**prompts, name: text}, "default_prompt": name}
