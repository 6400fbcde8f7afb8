"""Checks IOB tags of entities (IOB2, Tjong Kim Sang and Veenstra 1999).

B-X is the first word of an entity of kind X, I-X any other word of it, O a word of no entity.
"""

from __future__ import annotations

from collections.abc import Iterable

from teachonce.support.errors import UserError

OUTSIDE, FIRST, OTHER = "O", "B-", "I-"
BEGINNING = ""
"""Stands for the tag before the first word of a sentence."""
Step = tuple[str | None, str]
"""The tag of the word before, and the tag of a word.

The former is BEGINNING for the first word of a sentence, None where the word before has no tag.
"""


def is_iob(labels: Iterable[str]) -> bool:
    """Tell whether the labels of a tagger are IOB: some begin an entity, and all are O, B-X or I-X.

    Parts of speech are not, nor are tags that never say where an entity begins.
    """
    prefixes = {label if label == OUTSIDE else label[:2] for label in labels}
    return FIRST in prefixes and prefixes <= {OUTSIDE, FIRST, OTHER}


def check_tag(tag: str, where: str) -> None:
    """Raise UserError, which names `where`, for a tag that is not IOB whatever stands before it."""
    if tag != OUTSIDE and not tag.startswith((FIRST, OTHER)):
        raise UserError(
            f"{where}: tag {tag!r} is neither O nor B-... nor I-...; entities need IOB tags, take"
            " downstream --task pos for others"
        )


def check_order(before: str | None, tag: str, where: str) -> None:
    """Raise UserError, which names `where`, for an I-X that follows neither B-X nor I-X.

    `before` and `tag` are those of a Step.
    """
    kind = tag.removeprefix(OTHER)
    if kind == tag or before in (None, FIRST + kind, tag):
        return
    place = f"after {before!r}" if before else "at the beginning of a sentence"
    raise UserError(
        f"{where}: tag {tag!r} stands {place}, where no {kind} has begun; write {FIRST}{kind} at"
        " the first word of every entity (IOB2)"
    )
