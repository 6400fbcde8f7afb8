"""The advised commands repair damaged stores, for a sample of all damages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integrity import dead_ends
from tests.integrity.dead_ends import ENDINGS, DeadEnd, Scene, advised

CHOSEN = {
    "zarr": ("calibration emptied", "parts lost", "parts/1 doubled", "zarr.json lost"),
    "h5": ("a.h5: teacher emptied", "a.h5: parts lost", "a.h5.parts/1.h5 doubled as part 7",
           "a.h5 truncated"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ext", "cases"),
    [("h5", 1), *(pytest.param(ext, 4, marks=pytest.mark.apart) for ext in ("zarr", "h5"))],
)
def test_no_dead_end(tmp_path: Path, ext: str, cases: int) -> None:
    found = list(dead_ends.tried(tmp_path, ext, cases, 0, CHOSEN[ext]))
    assert [ending for _, _, ending, _ in found if ending not in ENDINGS] == []
    states = Counter(state for state, *_ in found)
    assert set(states) == set(dead_ends.STATES) and max(states.values()) == cases
    assert len({ending for _, _, ending, _ in found}) > 1


def test_what_is_a_dead_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "a.zarr", "merged", ("feature-store", "merge", "b", "a.zarr"), "")
    for line in ("it is damaged", "type the `teacher-dump` command again"):
        with pytest.raises(DeadEnd, match="no command of a merged store"):
            advised(scene, line)
    assert advised(scene, "type `feature-store merge` again") == scene.command
