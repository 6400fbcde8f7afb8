"""What a look through a store found: problems, and strangers, which are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from teachonce.store.containers.interface import Flaw


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, as a line for a person.

    `part` is the number of its part, None outside the parts. `array` is the path of an array whose
    values are lost. `group` is the path of a group whose metadata are wrong; they hold nothing that
    is not known otherwise.
    """

    line: str
    part: int | None = None
    array: str | None = None
    group: str | None = None


@dataclass
class Report:
    """What `verify` read, and what it found.

    Problems name part, array and chunk. `strangers` are lines, too: files and objects that the
    format does not know. No reader looks at them. `repair` adds where it moved what is damaged, and
    what to do next.
    """

    parts: int
    arrays: int = 0
    bytes: int = 0
    found: list[Problem] = field(default_factory=list)
    odd: list[Flaw] = field(default_factory=list)
    aside: Path | None = None
    undo: str = ""
    advice: str = ""

    def take(self, other: Report) -> None:
        """Add what another report read and found."""
        self.arrays, self.bytes = self.arrays + other.arrays, self.bytes + other.bytes
        self.found += other.found
        self.odd += other.odd

    @property
    def problems(self) -> list[str]:
        return [problem.line for problem in self.found]

    @property
    def strangers(self) -> list[str]:
        return [flaw.line for flaw in self.odd]

    def damaged_parts(self) -> set[int]:
        """Numbers of the parts that have lost something that their arrays alone hold."""
        return {p.part for p in self.found if p.part is not None and p.group is None}

    def lost_outside(self) -> set[str]:
        """Paths of the arrays outside the parts that are lost."""
        return {p.array for p in self.found if p.part is None and p.array is not None}
