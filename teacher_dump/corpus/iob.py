"""IOB tags of entities (IOB2, Tjong Kim Sang and Veenstra 1999): B-X is the first word of an entity
of kind X, I-X any other word of it, O a word of none."""

from __future__ import annotations

from collections.abc import Iterable

from support.errors import UserError

OUTSIDE, FIRST, OTHER = "O", "B-", "I-"
BEGINNING = ""
"""In place of the tag before that of a sentence's first word."""
Step = tuple[str | None, str]
"""The tag of a word behind that of the word before: BEGINNING for the first of a sentence, None
where that word has none."""


def is_iob(labels: Iterable[str]) -> bool:
    """Whether the labels of a tagger are IOB: some begin an entity, and none are of another kind.

    Parts of speech are not, nor are tags that never tell where an entity begins.
    """
    prefixes = {label if label == OUTSIDE else label[:2] for label in labels}
    return FIRST in prefixes and prefixes <= {OUTSIDE, FIRST, OTHER}


def check_tag(tag: str, where: str) -> None:
    """Raises UserError, naming `where`, for a tag that is not IOB, whatever stands before it."""
    if tag != OUTSIDE and not tag.startswith((FIRST, OTHER)):
        raise UserError(
            f"{where}: tag {tag!r} is neither O nor B-... nor I-...; entities need IOB tags, take"
            " downstream --task pos for others"
        )


def check_order(before: str | None, tag: str, where: str) -> None:
    """Raises UserError, naming `where`, for an I-X that neither B-X nor I-X stands `before`.

    Both are those of a Step.
    """
    kind = tag.removeprefix(OTHER)
    if kind == tag or before in (None, FIRST + kind, tag):
        return
    place = f"after {before!r}" if before else "at the beginning of a sentence"
    raise UserError(
        f"{where}: tag {tag!r} stands {place}, where no {kind} has begun; write {FIRST}{kind} at"
        " the first word of every entity (IOB2)"
    )
