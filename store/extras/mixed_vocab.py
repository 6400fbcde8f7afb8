"""A student's tokenizer and embeddings from mixed-vocabulary training (FORMAT.md, section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.store.errors import StoreError, without_remedy
from teachonce.store.format.manifest import DAMAGED
from teachonce.store.read.stored_tokenizer import json_object, parse_tokenizer
from teachonce.support.arrays import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from teachonce.store.read.store import FeatureStore

GROUP = "teacher/mixed-vocab"
EMBEDDINGS, TOKENIZER, SETTINGS = "embeddings", "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True, eq=False)
class MixedVocab:
    """Holds a student's word embeddings, trained inside the teacher (Zhao et al. 2021, stage I).

    embeddings: float32 [Vs, d], a row for each of the student's Vs pieces.
    tokenizer, settings: tokenizer.json and tokenizer_config.json, whose ids are the rows.
    """

    embeddings: Array
    tokenizer: bytes
    settings: bytes

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store, by path."""
        return {
            f"{GROUP}/{EMBEDDINGS}": np.asarray(self.embeddings, np.float32),
            f"{GROUP}/{TOKENIZER}": np.frombuffer(self.tokenizer, np.uint8),
            f"{GROUP}/{SETTINGS}": np.frombuffer(self.settings, np.uint8),
        }

    def backend(self) -> Tokenizer:
        """Load the student's tokenizer. Raises StoreError if it cannot be read."""
        return parse_tokenizer(self.tokenizer, f"{GROUP}/{TOKENIZER}")

    def read_settings(self) -> dict[str, Any]:
        """Read the settings of the tokenizer. Raises StoreError if they are not a JSON object."""
        return json_object(self.settings, f"{GROUP}/{SETTINGS}")

    @staticmethod
    def stored(store: FeatureStore) -> MixedVocab | None:
        """Read and check a store's mixed vocabulary; None if the store has none.

        Raises StoreError if it is damaged, or if embeddings and tokenizer have different sizes.
        """
        if not any(name.startswith(f"{GROUP}/") for name in store.manifest.arrays):
            return None
        embeddings, tokenizer, settings = (
            store.outside(f"{GROUP}/{name}") for name in (EMBEDDINGS, TOKENIZER, SETTINGS)
        )
        vocabulary = MixedVocab(embeddings, tokenizer.tobytes(), settings.tobytes())
        try:
            pieces = vocabulary.backend().get_vocab_size()
            vocabulary.read_settings()
        except StoreError as error:
            raise StoreError(f"{store.path}: {without_remedy(error)}; {DAMAGED}") from error
        shape: Any = (embeddings.dtype.name, embeddings.ndim, len(embeddings))
        if shape != ("float32", 2, pieces):
            raise StoreError(
                f"{store.path}: {GROUP}/{EMBEDDINGS} is not a float32 [{pieces}, d], a row"
                f" for each piece of the tokenizer stored with it; {DAMAGED}"
            )
        return vocabulary

    @staticmethod
    def of(store: FeatureStore) -> MixedVocab:
        """Read and check a store's mixed vocabulary. Raises StoreError if the store has none, and
        as `stored` does."""
        vocabulary = MixedVocab.stored(store)
        if vocabulary is None:
            raise StoreError(
                f"{store.path}: holds no vocabulary of a mixed-vocabulary training; make such a"
                " store with `teacher-dump mixed-vocab`, or choose another --vocab and --init"
            )
        return vocabulary
