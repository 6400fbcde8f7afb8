"""The prompts and the similarity of sentence-embedding teachers: which of them a student inherits,
and whether it can reproduce them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.sentence_settings import SentenceSettings, settings_from
from teachonce.store import FeatureStore
from teachonce.support.errors import UserError

DISTANCES = ("euclidean", "manhattan")


def vector_settings(store: FeatureStore) -> SentenceSettings:
    """Read the sentence-transformers settings of a store's teacher; empty ones if it has none.

    Raises UserError for an invalid value.
    """
    if SETTINGS not in store.teacher_files():
        return SentenceSettings()
    return settings_from(store.teacher_settings(SETTINGS), str(store.path))


def inherited_settings(stores: Sequence[FeatureStore]) -> dict[str, Any]:
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
    of_vectors = [store for store in stores if store.features.embedding]
    similarities = {vector_settings(store).similarity or "cosine" for store in of_vectors}
    # Teachers that differ: the default of sentence-transformers.
    similarity = similarities.pop() if len(similarities) == 1 else "cosine"
    settings: dict[str, Any] = {"prompts": prompts, "similarity": similarity}
    if len(read) != 1 or not (text := read.pop()):
        return settings
    names = [name for name, prompt in prompts.items() if prompt == text]
    name = names[0] if names else "default"
    return settings | {"prompts": {**prompts, name: text}, "default_prompt": name}


def check_similarity(store: FeatureStore) -> None:
    """Raise UserError for a teacher with a distance as similarity and vectors that are not
    normalised."""
    # Losses of vectors compare directions only: a student does not reproduce the lengths.
    spec, name = store.features.embedding, vector_settings(store).similarity
    if spec and name in DISTANCES and not spec.normalised:
        raise UserError(
            f"{store.path}: its teacher compares texts by {name} distance (similarity_fn_name of"
            f" {SETTINGS}), which depends on the lengths of vectors, and a student is trained on"
            " directions only; leave losses of vectors out, or dump a teacher with cosine or dot"
            " similarity"
        )


def lost_lengths(store: FeatureStore) -> str:
    """Return a line about a teacher whose similarity depends on the lengths of its vectors, which a
    student does not have; "" for other teachers."""
    spec = store.features.embedding
    if spec is None or spec.normalised or vector_settings(store).similarity != "dot":
        return ""
    return (
        f"{store.path}: its teacher compares texts by the dot product of vectors of any length, but"
        " the student's vectors have length 1: documents that the student embeds are ranked by"
        " directions alone"
    )
