"""What the settings of teachers of vectors demand of a student, and what no student can give."""

from __future__ import annotations

from collections.abc import Sequence

from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.sentence_settings import SentenceSettings, settings_from
from teachonce.store import FeatureStore
from teachonce.support.errors import UserError

DISTANCES = ("euclidean", "manhattan")


def vector_settings(store: FeatureStore) -> SentenceSettings:
    """Read the teacher's settings for vectors out of a store; empty ones if it has none.

    Raises UserError for a wrong value.
    """
    if SETTINGS not in store.teacher_files():
        return SentenceSettings()
    return settings_from(store.teacher_settings(SETTINGS), str(store.path))


def similarity_of(stores: Sequence[FeatureStore]) -> str:
    """Return how the teachers compare texts, if they agree; else `cosine`, which vectors of
    length 1 allow.

    sentence-transformers takes the cosine, too, where a teacher does not say.
    """
    of_vectors = [store for store in stores if store.features.embedding]
    names = {vector_settings(store).similarity or "cosine" for store in of_vectors}
    return names.pop() if len(names) == 1 else "cosine"


def check_space(store: FeatureStore) -> None:
    """Raise UserError for a teacher whose texts are compared by a distance between vectors that
    have no length of 1: losses of vectors compare directions, and a student has no lengths."""
    spec, name = store.features.embedding, vector_settings(store).similarity
    if spec and name in DISTANCES and not spec.normalised:
        raise UserError(
            f"{store.path}: its teacher compares texts by {name} distance (similarity_fn_name of"
            f" {SETTINGS}), which lengths decide as well, and a student learns the directions of"
            " vectors alone; leave losses of vectors out, or dump a teacher that is compared by"
            " cosine or dot"
        )
