"""The validations of a training, finished or not, as its metrics.jsonl tells them."""

from __future__ import annotations

import json
from pathlib import Path

METRICS = "metrics.jsonl"


def validations(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Read step and figures of each validation of the training in `folder`."""
    path, found = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            figures = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if any(name.startswith("valid_") for name in figures):
            found.append((figures.pop("step"), figures))
    return found
