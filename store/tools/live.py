"""What a store says beside what its teacher says now. The teacher is run by another package, which
names its checker as the entry point `check` of the group `teachonce.live`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distributions

from store.read.store import FeatureStore
from support.errors import UserError

GROUP = "teachonce.live"
Checker = Callable[[FeatureStore, str, int, int, str], "LiveReport"]


@dataclass
class Comparison:
    """One feature of the sample: errors of what is stored against what the teacher gives.

    `promised` is the largest error that the codec allows anywhere in the sample, `share` the
    largest error as a share of what is allowed at its place (codec and precision together).
    """

    feature: str
    unit: str
    largest: float = 0.0
    mean: float = 0.0
    promised: float = 0.0
    share: float = 0.0


@dataclass
class LiveReport:
    """What was compared, and in a line each what is not as it must be."""

    headline: str
    rows: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def checker() -> Checker:
    """What runs a sample of a store through its teacher. UserError where nothing can."""
    # Not `entry_points`: it sees one installation of a name only, and that may be an old one.
    found = [e for package in distributions() for e in package.entry_points if e.group == GROUP]
    if not found:
        raise UserError(
            "--model: no package here can run a teacher; install teachonce whole (`pip install"
            " teachonce`, or again with `pip install -e .` in its folder)"
        )
    check: Checker = found[0].load()
    return check
