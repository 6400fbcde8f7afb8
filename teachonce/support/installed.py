"""What runs in a process: versions of libraries, and a hash of this project's code. Processes that
work on one thing must have the same."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

NAMES = ("teachonce", "torch", "transformers", "tokenizers", "numpy", "zarr", "h5py")


def software() -> dict[str, str]:
    """Return the versions of everything that shapes the numbers of a store or of a student."""
    return {"python": platform.python_version(), **{name: version(name) for name in NAMES}}


def installed() -> dict[str, str]:
    """Return `software`, the kind of machine, and a hash of the code."""
    code, above = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(file for package in above.iterdir() for file in package.rglob("*.py")):
        code.update(f"{file.relative_to(above)}\n".encode() + file.read_bytes())
    return {**software(), "machine": platform.machine(), "code": code.hexdigest()[:12]}
