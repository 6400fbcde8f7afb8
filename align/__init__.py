"""Align two tokenizations of one text: the teacher's tokens with the student's.

This package needs NumPy alone; it reads no store and runs no model. Batches are flat: tokens are
concatenated without padding, with the start of each sequence. Offsets count characters (Unicode
code points) of the sequence's own text.

    text.py         FlatText: the characters of a batch; Tokens: its tokens; AlignmentError
    strategies.py   Alignment: pairs of runs of tokens; align_match, align_span, align_bytes,
                    align_reduce
                    Tokenizations: a batch in both tokenizations, aligned by a strategy's name
    vocabulary.py   Vocabulary: the pieces of a tokenizer.json without their marks (##, Ġ, ▁, </w>)
    normalisers.py  the normalisers of a tokenizer.json
    byte_edges.py   where tokens end in the UTF-8 of a text, for align_bytes
    mapping.py      VocabularyMap: teacher id -> the student's equal piece, or its split
    places.py       which map of `VocabularyMap.maps` applies at each place of a text

The text `story.`, teacher pieces `story | .`, student pieces `sto | ##ry | .`:

>>> import json
>>> import numpy as np
>>> from teachonce.align import FlatText, Tokens, Vocabulary, VocabularyMap
>>> from teachonce.align import align_match, align_reduce, align_span
>>> def wordpiece(*pieces):
...     vocab = {piece: number for number, piece in enumerate(["[UNK]", *pieces])}
...     model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocab}
...     pre_tokenizer = {"type": "BertPreTokenizer"}
...     return Vocabulary.from_tokenizer_json(
...         json.dumps({"model": model, "pre_tokenizer": pre_tokenizer})
...     )
>>> vocabulary = VocabularyMap.between(wordpiece("story", "."), wordpiece("sto", "##ry", "."))
>>> text = FlatText.of(["story."])
>>> teacher = Tokens.of([[1, 2]], [[(0, 5), (5, 6)]], [[0, 0]])
>>> student = Tokens.of([[1, 2, 3]], [[(0, 3), (3, 5), (5, 6)]], [[0, 0, 0]])

`match` pairs the piece that both vocabularies have, the full stop:

>>> align_match(text, teacher, student, vocabulary)
Alignment(teacher=[[1, 2]], student=[[2, 3]])

`span` pairs the smallest runs that cover the same characters:

>>> align_span(text, teacher, student)
Alignment(teacher=[[0, 1], [1, 2]], student=[[0, 2], [2, 3]])

`reduce` makes the student's input from the teacher's tokens:

>>> reduced = align_reduce(teacher, vocabulary)
>>> reduced.tokens.ids.tolist(), reduced.unknown.any().item()
([1, 2, 3], False)
>>> reduced.alignment
Alignment(teacher=[[0, 1], [1, 2]], student=[[0, 2], [2, 3]])
"""

from teachonce.align.mapping import VocabularyMap
from teachonce.align.strategies import (
    Alignment,
    Reduced,
    Tokenizations,
    align_bytes,
    align_match,
    align_reduce,
    align_span,
)
from teachonce.align.text import AlignmentError, FlatText, Tokens
from teachonce.align.vocabulary import Vocabulary

__all__ = [
    "Alignment",
    "AlignmentError",
    "FlatText",
    "Reduced",
    "Tokenizations",
    "Tokens",
    "Vocabulary",
    "VocabularyMap",
    "align_bytes",
    "align_match",
    "align_reduce",
    "align_span",
]
