"""Run the `downstream` command as a user types it, and read its scores."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from teachonce.downstream.cli import main
from tests.end_to_end import support

run = partial(support.invoke, main)
done = partial(support.ok, main)
refused = partial(support.refused, main)


def scores_of(out: Path) -> Any:
    """Return the content of a run's scores.json."""
    return json.loads((out / "scores.json").read_text())
