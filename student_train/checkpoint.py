"""Checkpoints: written whole or not at all, and passed over if torn."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

KEPT = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `state` as checkpoint `step` under a temporary name, flush it to disk, rename; keep the
    last two."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / ".unfinished"
    with unfinished.open("wb") as file:
        torch.save({"step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / f"step-{step:09d}.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-KEPT]:
        old.unlink()


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, on the CPU; None where there is none."""
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # torch raises anything at all on a torn file, and the one before will do
            continue
    return None


def remove_checkpoints(folder: Path) -> None:
    """What a finished student no longer needs."""
    shutil.rmtree(folder, ignore_errors=True)
