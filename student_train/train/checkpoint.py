"""Checkpoints: written whole or not at all, with a checksum, and passed over if torn.

Torch is imported where it is used: a command that is stopped while torch loads tells of them, too.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from pathlib import Path
from typing import Any

from support import files

KEPT = 2
DIGEST_BYTES = 32


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `state` as checkpoint `step`, ended by the SHA-256 of all bytes before; keep the last
    two."""
    import torch

    folder.mkdir(exist_ok=True)
    files.discard(folder, files.UNFINISHED)  # of one that was killed as it saved
    buffer = io.BytesIO()
    torch.save({"step": step, **state}, buffer)
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    files.write(folder / f"step-{step:09d}.pt", buffer.getbuffer())
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[Path]]:
    """The newest whole checkpoint, on the CPU (None where there is none), and the torn ones after
    it, which are removed: they must not count among those that are kept."""
    import torch

    torn: list[Path] = []
    for path in _newest_first(folder):
        data = path.read_bytes()
        whole, digest = memoryview(data)[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if hashlib.sha256(whole).digest() == digest:
            return torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True), torn
        path.unlink()
        torn.append(path)
    return None, torn


def newest_checkpoint(folder: Path) -> str:
    """What to tell of the newest checkpoint."""
    paths = _newest_first(folder)
    return f"saved at step {int(paths[0].stem[5:])} ({paths[0]})" if paths else "nothing saved yet"


def remove_checkpoints(folder: Path) -> None:
    """What a finished student no longer needs."""
    shutil.rmtree(folder, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)
