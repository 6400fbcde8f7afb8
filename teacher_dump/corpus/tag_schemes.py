"""Recognises schemes of entity tags, and converts between them.

IOB2  B-X is the first word of an entity of kind X, I-X any other word of it, O a word of no entity
      (Tjong Kim Sang and Veenstra 1999)
IOB1  I-X is any word, but B-X the first word of an entity directly after another of kind X
      (Ramshaw and Marcus 1995)
BIOES like IOB2, but E-X is the last word of several, S-X a single word; BILOU writes L and U
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

OUTSIDE, FIRST, OTHER = "O", "B-", "I-"
NO_LABEL = "-1"
BEGINNING = ""  # in place of the tag before the first word of a sentence
Step = tuple[str | None, str]
"""The previous word's tag, and a word's tag.

The previous tag is BEGINNING for the first word of a sentence, None if the previous word has none.
"""
TAG = re.compile(r"O|[BIESLU]-\S+")  # an entity tag of any scheme
LAST_AND_SINGLE = {"BIOES": ("E-", "S-"), "BILOU": ("L-", "U-")}
# Each BIOES tag can be converted alone to any other scheme, because it shows where in its entity a
# word is.
ENTITIES = "BIOES"
BEGINNINGS, ENDS = ("B-", "S-", "U-"), ("E-", "L-", "S-", "U-")


def scheme_of(tags: Iterable[str], steps: Iterable[Step] = ()) -> str | None:
    """Return the name of the scheme of tags; None if they belong to none.

    IOB1 and IOB2 have the same tags, but differ in the `steps` from tag to tag. A file with both
    I-X at the beginning of an entity and B-X where IOB1 has none is read as IOB2.
    """
    prefixes = {tag if tag == OUTSIDE else tag[:2] for tag in tags}
    # First: BIOES and BILOU also have the tags B-X and I-X, by which IOB is recognised.
    for name, marks in LAST_AND_SINGLE.items():
        if prefixes & {*marks} and prefixes <= {OUTSIDE, FIRST, OTHER, *marks}:
            return name
    if not prefixes & {FIRST, OTHER} or not prefixes <= {OUTSIDE, FIRST, OTHER}:
        return None
    pairs = [(before, tag) for before, tag in steps if before is not None]
    started = [pair for pair in pairs if pair[1].startswith(OTHER) and not _same(*pair)]
    apart = [pair for pair in pairs if pair[1].startswith(FIRST) and not _same(*pair)]
    return "IOB1" if started and not apart else "IOB2"


def steps_of(sentences: Iterable[Sequence[str]]) -> Iterator[Step]:
    """Yield (previous tag, tag) for each word of sentences, which are given as lists of tags."""
    for tags in sentences:
        yield from zip((BEGINNING, *tags), tags, strict=False)


def _same(before: str, tag: str) -> bool:
    """Return whether both tags belong to entities of the same kind."""
    return before != OUTSIDE and before[2:] == tag[2:]


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Find the entities of a sentence in any scheme: (begin, end, kind) in words, end exclusive."""
    spans: list[tuple[int, int, str]] = []
    going_on = ""  # kind of the entity that the next word may continue
    for index, tag in enumerate(tags):
        mark, kind = tag[:2], tag[2:]
        if tag == OUTSIDE:
            going_on = ""
            continue
        if mark in BEGINNINGS or going_on != kind:
            spans.append((index, index, kind))
        spans[-1] = (spans[-1][0], index + 1, kind)
        going_on = "" if mark in ENDS else kind
    return spans


def as_tags(length: int, spans: Iterable[tuple[int, int, str]], scheme: str) -> list[str]:
    """Return the tags of a sentence of `length` words, in IOB2 or in a scheme of LAST_AND_SINGLE.

    spans: its entities, as `entities` returns them.
    """
    last, single = LAST_AND_SINGLE.get(scheme, (OTHER, FIRST))
    tags = [OUTSIDE] * length
    for begin, end, kind in spans:
        marks = [FIRST, *[OTHER] * (end - begin - 2), last] if end - begin > 1 else [single]
        tags[begin:end] = [mark + kind for mark in marks]
    return tags


def written_in(tag: str, scheme: str) -> str:
    """Convert a tag of the scheme ENTITIES to IOB2, or to a scheme of LAST_AND_SINGLE."""
    target_marks = LAST_AND_SINGLE.get(scheme, (OTHER, FIRST))
    marks = dict(zip(LAST_AND_SINGLE[ENTITIES], target_marks, strict=True))
    return marks.get(tag[:2], tag[:2]) + tag[2:]


def converted(tags: Sequence[str], scheme: str) -> list[str]:
    return as_tags(len(tags), entities(tags), scheme)
