"""An example without arguments prints its usage."""

from __future__ import annotations

import runpy

import pytest

from tests.examples.loading import EXAMPLES


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_without_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit, match=rf"python .*{name} [A-Z]"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
