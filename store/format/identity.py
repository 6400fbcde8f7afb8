"""Read the identity of a store: the command that made it, its corpora, its forgotten documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from teachonce.support.parsing import DIGITS

# Keys of an identity are free (FORMAT.md, section 4), so its values may have any form.


def object_in(value: Any, key: str) -> Mapping[str, Any]:
    """Return the object under a key of an identity, or of an object in it; {} if the value is no
    JSON object."""
    member = value.get(key) if isinstance(value, Mapping) else None
    return member if isinstance(member, Mapping) else {}


def _list_in(value: Any, key: str) -> list[Any]:
    """Return the list under a key of an object in an identity; [] if the value is no list."""
    member = value.get(key) if isinstance(value, Mapping) else None
    return member if isinstance(member, list) else []


def making_command(identity: Mapping[str, Any]) -> str:
    """Return the command that made a store, for error messages.

    A copy has the identity of its source, so `feature-store convert` is always listed as well. An
    empty identity means that the identity was lost.
    """
    if not identity:
        return (
            "`teacher-dump`, `feature-store merge` or `feature-store convert`, with the same"
            " arguments"
        )
    corpus = object_in(identity, "corpus")
    # Tested first: a grown or merged store may have forgotten documents since, and only `forget`
    # can continue it then (FORMAT.md, section 9).
    if "forgotten" in corpus:
        command = (
            "`feature-store forget` with the same documents if it was stopped; no command can"
            " restore what was lost after it: restore the store from a copy"
        )
    elif "grown_from" in corpus:
        command = "`teacher-dump --grow-from` with the same arguments"
    elif "merged" in corpus:
        command = "`feature-store merge` with the same stores"
    elif "mixed_vocab" in identity:
        command = "`teacher-dump mixed-vocab` with the same arguments"
    else:
        command = "`teacher-dump` with the same arguments"
    return f"{command}; for a copy, `feature-store convert` from the same store"


def corpora(corpus: Any) -> Iterator[Any]:
    """Yield each corpus whose text a store has, given the entry `corpus` of its identity.

    A grown store has the corpora of the store that it grew from, then its own. A merged store has
    the corpora of all its stores.
    """
    merged = _list_in(corpus, "merged")
    for inner in (*_list_in(object_in(corpus, "grown_from"), "corpora"), *merged):
        yield from corpora(inner)
    if not merged:
        yield corpus


def corpus_sources(corpus: Any) -> list[Mapping[str, Any]]:
    """List the sources of a corpus that `corpora` yields; an empty list if its entry `sources` is
    malformed."""
    sources = _list_in(corpus, "sources")
    return sources if all(isinstance(source, Mapping) for source in sources) else []


Run = tuple[int, int]
"""First and last of consecutive numbers."""
RUN = re.compile(f"({DIGITS})(?:-({DIGITS}))?")


def format_runs(runs: Iterable[Run]) -> str:
    """Format runs, which may overlap, in ascending order: `3,17-25`."""
    merged: list[list[int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in merged)


def parse_runs(text: object) -> list[Run]:
    """Parse the text that `format_runs` writes, and ignore any other text: a store is untrusted
    input."""
    runs = []
    for run in text.split(",") if isinstance(text, str) else ():
        if match := RUN.fullmatch(run):
            first, last = match.groups()
            runs.append((int(first), int(last or first)))
    return runs


def count_numbers(runs: Iterable[Run]) -> int:
    """Count the numbers of runs that do not overlap."""
    return sum(last - first + 1 for first, last in runs)
