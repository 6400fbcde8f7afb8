"""A writer that is killed anywhere, any number of times, produces the same bytes at the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from teachonce.store import open_store
from teachonce.support import files
from tests.store.dying import Killed, dies_at
from tests.store.write import killed
from tests.store.write.test_writing import contents
from tests.support.leased import Writer

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("ext", ["zarr", pytest.param("h5", marks=pytest.mark.apart)])
def test_killed_while_sealing(tmp_path: Path, ext: str) -> None:
    """A writer killed while it seals leaves a store that can be opened, unfinished or finished."""
    whole, broken = tmp_path / f"whole.{ext}", tmp_path / f"broken.{ext}"
    killed.main(whole)
    states: list[str] = []
    for delay in (0, 0.003, 0.01, 0.03):
        with Writer(broken) as writer:
            if writer.answer() != "done":  # finished at last, before the kill
                break
            for number in range(killed.PARTS if not states else 0):
                assert writer.tell(number) == "done"
            writer.say("seal")
            time.sleep(delay)
            writer.process.kill()
        fs = open_store(broken, allow_partial=True)
        states.append(fs.meta["state"])
        assert len(fs.manifest.parts) == killed.PARTS
        fs.close()
    killed.main(broken)
    assert "writing" in states
    assert contents(whole) == contents(broken)
    assert {*tmp_path.iterdir()} == {whole, broken}


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_killed_at_every_rename(tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / f"whole.{ext}", tmp_path / f"broken.{ext}"
    killed.main(whole)
    stops = 0
    for step in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(files, "rename", dies_at(1 + step % 2, done=bool(step % 2)))
            try:
                killed.main(broken)
                break
            except Killed:
                stops += 1
    killed.main(broken)
    assert stops > killed.PARTS // 2
    assert contents(whole) == contents(broken)
    assert {*tmp_path.iterdir()} == {whole, broken}
