"""The map from a teacher's pieces to a student's, for those who read a store."""

from __future__ import annotations

from teachonce.align import AlignmentError, Vocabulary, VocabularyMap
from teachonce.support.errors import UserError


def vocabulary_map(teacher: str, student: str) -> VocabularyMap:
    """Make the map between two vocabularies, each the content of a tokenizer.json.

    Raises UserError for a tokenizer that `align` cannot read.
    """
    try:
        return VocabularyMap.between(
            Vocabulary.from_tokenizer_json(teacher), Vocabulary.from_tokenizer_json(student)
        )
    except AlignmentError as error:
        raise UserError(
            f"the tokenizers of teacher and student cannot be aligned: {error}"
        ) from error
