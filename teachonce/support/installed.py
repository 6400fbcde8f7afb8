"""What runs in a process: versions of libraries, and a hash of this project's code. Processes that
work on one thing must have the same."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIBRARIES = ("transformers", "tokenizers", "torch", "numpy")
"""Packages whose versions may change what a teacher gives."""
NAMES = ("teachonce", "torch", "transformers", "tokenizers", "numpy", "zarr", "h5py")


def software() -> dict[str, str]:
    """Return the versions of everything that shapes the numbers of a store or of a student."""
    return {"python": platform.python_version(), **{name: version(name) for name in NAMES}}


def other_versions(then: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the libraries that run a teacher whose version is not that in a store's `software`:
    then and now."""
    now = software()
    return {
        name: (str(then[name]), now[name])
        for name in LIBRARIES
        if name in then and then[name] != now[name]
    }


def version_words(versions: Mapping[str, tuple[str, str]]) -> str:
    """Write what `other_versions` returns."""
    return ", ".join(f"{name} {then} then and {now} now" for name, (then, now) in versions.items())


def installed() -> dict[str, str]:
    """Return the versions of `software()`, the machine type, and a hash of this package's code."""
    code, above = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(file for package in above.iterdir() for file in package.rglob("*.py")):
        code.update(f"{file.relative_to(above)}\n".encode() + file.read_bytes())
    return {**software(), "machine": platform.machine(), "code": code.hexdigest()[:12]}
