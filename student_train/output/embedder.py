"""Saves a student of text vectors as a sentence-transformers folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from teachonce.checkpoints.sentence_folder import VectorHead, write_sentence_folder
from teachonce.store import FeatureStore
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.plan.vector_space import similarity_of, vector_settings


def save_embedder(
    student: PreTrainedModel,
    head: VectorHead,
    terms: Sequence[Term],
    stores: Sequence[FeatureStore],
    longest: int,
    out: Path,
) -> int:
    """Save a student as a sentence-transformers folder. Returns the number of parameters.

    longest: the max length in tokens. The masked-LM head is left out if no loss trained it.
    """
    of_vocabulary = any(term.loss.head == "vocabulary" for term in terms)
    saved: Any = student if of_vocabulary else student.base_model
    saved.save_pretrained(out)
    static = student.config.model_type == "static"
    write_sentence_folder(out, head, max_length=longest, static=static, **settings_of(stores))
    return int(saved.num_parameters()) + sum(p.numel() for p in head.parameters())


def settings_of(stores: Sequence[FeatureStore]) -> dict[str, Any]:
    """Return settings that the student inherits from its teachers: prompts by name, the default
    prompt, and the similarity. A name for which teachers have different prompts is left out.

    The default prompt is the prompt of the dumps, if all have the same. It is named `default` if
    no teacher has a name for it.
    """
    named: dict[str, set[str]] = {}
    read = {store.features.embedding.prompt for store in stores if store.features.embedding}
    for store in stores:
        for name, prompt in vector_settings(store).prompts.items():
            named.setdefault(name, set()).add(prompt)
    # Two teachers with different texts for one name: whichever the student took, one of them did
    # not read it.
    prompts = {name: texts.pop() for name, texts in named.items() if len(texts) == 1}
    settings: dict[str, Any] = {"prompts": prompts, "similarity": similarity_of(stores)}
    if len(read) != 1 or not (text := read.pop()):
        return settings
    names = [name for name, prompt in prompts.items() if prompt == text]
    name = names[0] if names else "default"
    return settings | {"prompts": {**prompts, name: text}, "default_prompt": name}
