"""All papers by name, at each size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.reproduce import (
    kolesnikova,
    mukherjee,
    slovakbert,
    tinymbert,
    tinymbert_tables,
    titles,
    zhao,
)
from benchmarks.reproduce.source import SMALL, TITLE, Source

PAPERS = {
    "kolesnikova": (kolesnikova,),
    "mukherjee": (mukherjee,),
    "zhao": (zhao,),
    "slovakbert": (slovakbert,),
    "tinymbert": (tinymbert, tinymbert_tables),
}
NAMES = tuple(PAPERS)
BEST = (
    "Our recipe is compared with the best arm of each source, with the settings, data and steps of"
    " that source. For masked LMs, ours is the default of `student-train` (`--loss mlm=1,hidden=30"
    " --align span --init auto`). For students of a task, ours is the default for a task with the"
    " same hidden states (`--loss ce=1,kl=1,hidden=30`), in one stage that is as long as all stages"
    " of the source together."
)
"""Settings of the comparison with our recipe, as its section states them."""


def sources(name: str, size: str, data: Path = Path(), larger: bool = False) -> dict[str, Source]:
    """Return the tables of a paper, each a source, by the name of their folder.

    data: the user's own folder of the full size; tables with optional files are included if the
        files exist.
    larger: whether there is a second, larger teacher, as some tables need.
    """
    if size == SMALL:
        return {folder: source for paper in PAPERS[name] for folder, source in paper.SMALL.items()}
    if size == TITLE:
        every = [{f"{name}-title": titles.TITLES[name]}]
    else:
        every = [paper.full(data, larger) for paper in PAPERS[name]]
    return {folder: _unprobed(source) for tables in every for folder, source in tables.items()}


def _unprobed(source: Source) -> Source:
    """Leave out the probes: their lengths are valid for the small size only."""
    return replace(source, claims=[replace(claim, probe=None) for claim in source.claims])
