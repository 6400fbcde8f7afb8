"""Checkpoints of a training: written atomically, with a checksum.

Torch is imported inside functions, because a command that is stopped while torch loads also lists
checkpoints.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import UserError, first_line

# Two: if the newest file is torn, a resumed training reads the one before it.
RETAINED = 2  # checkpoints of a folder
DIGEST_BYTES = 32
NAME = re.compile(r"step-\d{9,}\.pt")


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write one file: `state` as torch saves it, then the SHA-256 of these bytes."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    # Not a view: if the disk is full, the error would hold the view, and the buffer could not be
    # closed.
    files.write(path, buffer.getvalue())


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read one file, on the CPU and without pickled code; None if its checksum does not match.

    Raises UserError for a file whose checksum matches but which is not a checkpoint.
    """
    import torch

    data = path.read_bytes()
    # A view: a slice of bytes would copy the whole checkpoint.
    content, digest = memoryview(data)[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    with fitting(path):
        # On the CPU: the device of the process that saved it may be missing here.
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        # A copy raises TypeError, which `fitting` reports, if this is not a mapping.
        state: dict[str, Any] = {**loaded}
    return state


@contextmanager
def fitting(where: Path) -> Iterator[None]:
    """Raise UserError if reading or restoring the checkpoint `where` fails in the `with` block."""
    # What torch.load, load_state_dict and look-ups in a state raise for a file of another program.
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{where}: is not a checkpoint of this training ({type(error).__name__}:"
            f" {first_line(error)}); remove it to start from scratch"
        ) from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{where}: holds objects other than numbers, whose code is never run (weights_only);"
            " remove it to start from scratch"
        ) from error


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `state` as the checkpoint of a step; the folder retains the last RETAINED."""
    folder.mkdir(exist_ok=True)
    files.discard(folder, files.UNFINISHED)  # left by a process that was killed while it saved
    # With leading zeros, so that names sort by step.
    write_checkpoint(folder / f"step-{step:09d}.pt", {"step": step, **state})
    for old in _newest_first(folder)[RETAINED:]:
        old.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[Path]]:
    """Read the newest complete checkpoint of a folder, or None, and remove the incomplete ones that
    are newer: they must not count among the last RETAINED.

    Returns the state, and the paths of the removed checkpoints.
    """
    torn: list[Path] = []
    for path in _newest_first(folder):
        if (state := read_checkpoint(path)) is not None:
            return state, torn
        path.unlink()
        torn.append(path)
    return None, torn


def has_checkpoints(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, also an incomplete one."""
    return bool(_newest_first(folder))


def newest_checkpoint(folder: Path) -> str:
    """Describe the newest checkpoint of a folder: its step and path, or that there is none."""
    paths = _newest_first(folder)
    return f"saved at step {int(paths[0].stem[5:])} ({paths[0]})" if paths else "nothing saved yet"


def remove_checkpoints(folder: Path) -> None:
    """Remove the folder, which a finished student no longer needs."""
    shutil.rmtree(folder, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    """List the checkpoints, the newest first. Other files in the folder are ignored."""
    named = (path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))
    return sorted((path for path in named if path.is_file()), reverse=True)
