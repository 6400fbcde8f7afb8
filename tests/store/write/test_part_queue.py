"""Parts wait in a queue next to the store; the holder of a part's lease makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.processes import finish
from teachonce.store.write.part_queue import PartQueue
from teachonce.support.lease import Taken
from tests.support.leased import held


def filled(folder: Path, parts: int = 6) -> PartQueue:
    queue = PartQueue(folder / "a.zarr")
    queue.begin()
    for number in range(parts):
        queue.put(number, b"%d" % number, "mark")
    return queue


def test_own_parts_come_first(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    taken = [queue.take(1, 3) for _ in range(6)]
    assert [part.number for part in taken if part] == [1, 4, 0, 2, 3, 5]
    assert all(part and part.data == b"%d" % part.number for part in taken)
    assert queue.take(1, 3) is None and queue.leased() == set(range(6))
    queue.drop(4)
    queue.close()
    assert queue.numbers() == {0, 1, 2, 3, 5} and queue.leased() == set()


def test_a_part_in_other_hands_is_left_alone(tmp_path: Path) -> None:
    queue = filled(tmp_path, 2)
    with held(queue.folder / "0") as process:
        part = queue.take()
        assert part and part.number == 1 and queue.take() is None
        with pytest.raises(Taken, match=f"process {process.pid} on"):
            queue.check_idle()
        process.kill()
        finish(process)
        queue.check_idle()
        part = queue.take()
        assert part and part.number == 0
    queue.close()


def test_the_end_is_reported_once_it_is_known(tmp_path: Path) -> None:
    queue = filled(tmp_path, 1)
    assert queue.ended() is None
    queue.end({"parts": 1, "tokens": 5}, "mark")
    assert queue.ended() == {"parts": 1, "tokens": 5} and queue.numbers() == {0}
    (queue.folder / "end.json").write_text("{")
    assert queue.ended() is None
    queue.remove()
    queue.remove()
    assert not queue.folder.exists() and queue.numbers() == set() and queue.take() is None
