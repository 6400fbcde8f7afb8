"""A writer that is killed anywhere, any number of times, ends with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from teachonce.store import open_store
from teachonce.support import files
from tests.store.dying import Killed, dies_at
from tests.store.write import killed
from tests.store.write.test_writing import contents


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_killed_at_every_rename(tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop just before and just after each step that gives something its name, the seal's too."""
    whole, broken = tmp_path / "whole" / f"a.{ext}", tmp_path / "broken" / f"a.{ext}"
    whole.parent.mkdir()
    broken.parent.mkdir()
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
        if broken.exists():  # what has the store's name can be opened: begun, or finished
            open_store(broken, allow_partial=True).close()
    killed.main(broken)
    assert stops > killed.PARTS // 2
    assert contents(whole) == contents(broken)
    assert [file.name for file in broken.parent.iterdir()] == [broken.name]
