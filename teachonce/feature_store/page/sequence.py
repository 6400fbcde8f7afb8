"""Collect what the page shows of a sequence, in the form that template and script read."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from teachonce.align import Alignment, Tokens
from teachonce.feature_store.page.lattice import Cluster, clusters
from teachonce.feature_store.piece_names import ReadablePieces, direction
from teachonce.feature_store.student_vocabulary import StudentVocabulary
from teachonce.store import FeatureStore, Record
from teachonce.store.tools.show import BEST, best_pieces, headline, sequence_facts
from teachonce.support.arrays import Array, starts

SHOWN = 8  # most likely pieces of a token
ACTIONS = ("the mask", "a random word", "the word itself")
OWN = "own"
"""Key of the student's own tokens; an alignment with a second input has tokens under its name."""


TokenRow = tuple[str, int, int, bool, bool, str]
"""A token as the page draws it: piece, begin, end, whether it is special, whether it replaces text
that the vocabulary cannot spell, and its text."""


@dataclass(frozen=True)
class SequenceSection:
    """Holds the section of the page about one sequence.

    students: the student's tokens, under the key OWN; an alignment with other tokens has its own
        key. lattices: the clusters of the text with these tokens, under the same keys. runs:
        (teacher begin, end, student begin, end) in tokens, by alignment. masks: (view, characters,
        word, replacement). data: the data for the page's script.
    """

    number: int
    headline: str
    texts: Sequence[str]
    text: str
    teacher: list[TokenRow]
    students: Mapping[str, list[TokenRow]]
    lattices: Mapping[str, list[Cluster]]
    runs: Mapping[str, list[tuple[int, int, int, int]]]
    views: Sequence[Mapping[str, Any]]
    masks: list[tuple[int, str, str, str]]
    data: Mapping[str, Any]

    @property
    def direction(self) -> str:
        """Return the writing direction of the text, `ltr` or `rtl`."""
        return direction(self.text)

    def pieces_of(self, name: str, token: int) -> str:
        """Return the student's pieces that an alignment pairs with a token of the teacher."""
        side = self.students.get(name, self.students.get(OWN))
        assert side is not None
        runs = self.runs[name]  # in order, and disjoint
        index = bisect_right(runs, token, key=itemgetter(0)) - 1
        if index < 0 or token >= runs[index][1]:
            return ""
        _, _, begin, end = runs[index]
        return " ".join(row[0] for row in side[begin:end])

    def most_likely(self, view: int, token: int) -> str:
        """Return the most likely pieces of a token, for a cell of a table."""
        facts = self.views[view]
        return best_pieces(facts["tokens"][token].get("best", ())[:BEST], facts["draws"])

    def masked(self, token: int) -> str:
        """Return the views in which a token is part of a masked word."""
        views = (v["view"] for v in self.views if v["tokens"][token].get("masked"))
        return ", ".join(map(str, views))


def sequence_section(
    store: FeatureStore,
    number: int,
    student: StudentVocabulary | None,
    pieces: ReadablePieces,
    maps: bool,
) -> SequenceSection:
    """Collect the section of a sequence. With `maps` it includes stored attention maps."""
    record = store[number]
    views = [sequence_facts(store, number, v, SHOWN, pieces) for v in range(store.features.views)]
    start = [0, len(record.token_ids)]
    teacher = Tokens(record.token_ids, record.offsets, record.special, np.array(start))
    names = [pieces.name(int(token)) for token in record.token_ids]
    unknown = pieces.names.readable(pieces.names.unknown or "")
    drawn = _token_rows(record.text, teacher, names, np.array([n == unknown for n in names]))
    students, lattices, runs = dict[str, list[TokenRow]](), dict[str, list[Cluster]](), {}
    if student is None:
        lattices[OWN] = clusters(record.text, [teacher])
    else:
        sides = student.tokenizations([record.text], teacher)
        for name, (tokens, pairs) in student.align_all(sides).items():
            key = OWN if tokens is sides.student else name
            runs[name] = _flat(pairs)
            if key not in students:
                labels = [student.name(int(token)) for token in tokens.ids]
                students[key] = _token_rows(record.text, tokens, labels, student.unknown(tokens))
                lattices[key] = clusters(record.text, [teacher, tokens])
    masks = _masks(record)
    data = {
        "number": number,
        "teacher": drawn,
        "students": students,
        "runs": runs,
        "best": [_best(facts) for facts in views],
        "masks": [[list(map(int, span)) for span in view.spans] for view in record.views],
        # By name: the map of each view.
        "attention": {
            name: [_packed(view.attention[name]) for view in record.views]
            for name in (record.features.attention if maps else ())
        },
    }
    # `views: 1`, so that the headline names no view: the section shows all views.
    line = headline({**views[0], "views": 1})
    return SequenceSection(
        number, line, record.texts, record.text, drawn, students, lattices, runs, views, masks, data
    )


def _token_rows(text: str, tokens: Tokens, names: Sequence[str], unknown: Array) -> list[TokenRow]:
    spans, special = np.asarray(tokens.offsets).tolist(), np.asarray(tokens.special).tolist()
    return [
        (name, begin, end, is_special, bool(lost), "" if is_special else text[begin:end])
        for name, (begin, end), is_special, lost in zip(names, spans, special, unknown, strict=True)
    ]


def _flat(pairs: Alignment) -> list[tuple[int, int, int, int]]:
    rows = np.concatenate([pairs.teacher, pairs.student], axis=1).tolist()
    return [(t_begin, t_end, s_begin, s_end) for t_begin, t_end, s_begin, s_end in rows]


def _best(facts: Mapping[str, Any]) -> list[list[tuple[int, float]]]:
    return [
        # Rounded, because a page has every probability as text.
        [(piece["id"], float(f"{piece['probability']:.4g}")) for piece in token.get("best", ())]
        for token in facts["tokens"]
    ]


def _masks(record: Record) -> list[tuple[int, str, str, str]]:
    """List the masked words: view, characters, word, and its replacement."""
    return [
        (view.number, f"{begin}:{end}", record.text[begin:end], ACTIONS[action])
        for view in record.views
        for begin, end, action in view.spans.tolist()
    ]


def _packed(probabilities: Array) -> str:
    # A byte stores the square root of a share, which resolves small shares better.
    codes = np.rint(255 * np.sqrt(np.clip(probabilities, 0, 1))).astype(np.uint8)
    # zlib's format is the `deflate` of DecompressionStream, by which the script reads it.
    return base64.b64encode(zlib.compress(codes.tobytes(), 9)).decode()


def attention_entries(store: FeatureStore, numbers: Sequence[int]) -> int:
    """Count the entries of all attention maps of some sequences."""
    sizes = [len(store[number].token_ids) ** 2 for number in numbers]
    return int(starts(sizes)[-1]) * len(store.features.attention) * store.features.views
