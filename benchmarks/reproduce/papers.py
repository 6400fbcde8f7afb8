"""All papers by name, at each size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.reproduce import kolesnikova, mukherjee, slovakbert, tinymbert, zhao
from benchmarks.reproduce.source import FULL, SMALL, Source

NAMES = ("kolesnikova", "mukherjee", "zhao", "slovakbert", "tinymbert")
BEST = (
    "settings, data and steps of each source. Ours: masked LMs by the default of `student-train`"
    " (`--loss mlm=1,hidden=30 --align span --init auto`); students of a task by its default there"
    " with the same hidden states (`--loss ce=1,kl=1,hidden=30`), in one stage as long as all of"
    " the source's together."
)
"""Settings of the comparison with our recipe, as its section tells them."""


def sources(name: str, size: str, data: Path = Path()) -> dict[str, Source]:
    """Return the sources of a paper, by the name of their folder: one for each of its data sets.

    Raises UserError where `data`, the user's own of the full size, lacks a file.
    """
    found: tuple[Source, ...]
    if name == "mukherjee":
        found = {SMALL: mukherjee.SMALL, FULL: mukherjee.FULL}[size]
    elif name == "tinymbert":
        found = (tinymbert.SMALL if size == SMALL else tinymbert.full(data),)
    elif name == "kolesnikova":
        found = (kolesnikova.SMALL if size == SMALL else kolesnikova.full(data),)
    else:
        paper = {"zhao": zhao, "slovakbert": slovakbert}[name]
        found = (paper.SMALL if size == SMALL else paper.FULL,)
    if size == FULL:
        found = tuple(map(_unprobed, found))
    return {name if len(found) == 1 else f"{name}-{n}": each for n, each in enumerate(found, 1)}


def _unprobed(source: Source) -> Source:
    """Leave out the probes, whose lengths are those of the small size."""
    return replace(source, claims=[replace(claim, probe=None) for claim in source.claims])
