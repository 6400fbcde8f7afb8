"""Sets of numbers as text: "3,17-25"."""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, int]
"""The first and the last number of consecutive ones."""


def joined(runs: Iterable[Run]) -> str:
    """Write runs, which may overlap, in ascending order."""
    found: list[list[int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)


def runs_of(text: object) -> list[Run]:
    """Read what `joined` writes. Nothing of anything else: a store may have been made by others."""
    found = []
    for run in text.split(",") if isinstance(text, str) else ():
        first, _, last = run.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.append((int(first), int(last or first)))
    return found


def number_of(runs: Iterable[Run]) -> int:
    """Count the numbers of runs that do not overlap."""
    return sum(last - first + 1 for first, last in runs)
