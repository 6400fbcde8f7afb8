"""The versions of the installed libraries, and a hash of this project's code. Processes that work
on the same store or student must have the same."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIBRARIES = ("transformers", "tokenizers", "torch", "numpy")
"""Packages whose versions may change the output of a teacher."""
NAMES = ("teachonce", "torch", "transformers", "tokenizers", "numpy", "zarr", "h5py")


def software() -> dict[str, str]:
    """Return the versions of all libraries that affect the numbers of a store or of a student."""
    return {"python": platform.python_version(), **{name: version(name) for name in NAMES}}


def other_versions(then: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the libraries that run a teacher and whose version differs from a store's `software`:
    (then, now) by name."""
    now = software()
    return {
        name: (str(then[name]), now[name])
        for name in LIBRARIES
        if name in then and then[name] != now[name]
    }


def version_words(versions: Mapping[str, tuple[str, str]]) -> str:
    """Format the result of `other_versions` for a message."""
    return ", ".join(f"{name} was {then} and is {now}" for name, (then, now) in versions.items())


def installed() -> dict[str, str]:
    """Return the versions of `software()`, the machine type, and a hash of this package's code."""
    code, above = hashlib.sha256(), Path(__file__).parents[1]
    # By package, because rglob follows no link below its start, and four packages of a checkout are
    # links.
    for file in sorted(file for package in above.iterdir() for file in package.rglob("*.py")):
        code.update(f"{file.relative_to(above)}\n".encode() + file.read_bytes())
    return {**software(), "machine": platform.machine(), "code": code.hexdigest()[:12]}
