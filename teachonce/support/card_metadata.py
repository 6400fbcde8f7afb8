"""Adds licence and languages to the metadata of a model card, the YAML above its text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from teachonce.support.errors import UserError

LICENSE = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*(\+\+)?")  # openrail++ is one
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual|code")
FRONT = "---\n"


def check_metadata(license: str | None, languages: Sequence[str]) -> None:
    """Raise UserError for a licence or language that the hub does not accept."""
    if license is not None and not LICENSE.fullmatch(license):
        raise UserError(
            f"--license {license}: expected the hub's name of a licence in lower case, such as mit,"
            " apache-2.0 or cc-by-4.0"
        )
    for code in languages:
        if not LANGUAGE.fullmatch(code):
            raise UserError(
                f"--language {code}: expected an ISO 639 code, such as en or ru, or multilingual"
            )


def with_metadata(card: str, license: str | None, languages: Sequence[str]) -> str:
    """Return a card whose metadata have these entries; existing entries are replaced.

    Raises UserError as `check_metadata` does.
    """
    check_metadata(license, languages)
    new = {"license": license, "language": list(languages)}
    # JSON is YAML, too, and its quotes keep the language `no` (Norwegian) from being read as false.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in new.items() if value]
    if not lines:
        return card
    front, text = "", card
    # From 3, the line break of the first fence, so that empty metadata are found as well.
    if card.startswith(FRONT) and (end := card.find(f"\n{FRONT}", 3)) > 0:
        front, text = card[4 : end + 1], card[end + 1 + len(FRONT) :]
    for name, value in new.items():
        if value:  # an entry may be a list over several lines
            front = re.sub(rf"^{name}:.*\n(?:[ -].*\n)*", "", front, flags=re.MULTILINE)
    return f"{FRONT}{front}{''.join(lines)}{FRONT}{text}"
