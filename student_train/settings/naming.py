"""The name and location of a student's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError

LONGEST = 40
"""Largest number of characters in a folder's name, which people type."""
MAIN = ("vocab", "student")
"""The settings in the name of a student's folder, outside of a sweep or if nothing varies."""
BY_VALUE = {"align", "init", "loss", "recipe", "student", "vocab"}
"""Settings of which a folder's name has only the value. For other settings it has name and value,
as in lr0.001."""


def settings_digest(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Return a short hash of `chosen`, which ends the name of a student's folder.

    settings: the result of `TrainOptions.describing`.
    chosen: the settings that are not at their default.
    """
    # Only the last component of a path enters the hash: a store that was moved, or is spelled
    # as a relative path, gives the same folder.
    kind, colon, named = settings["init"].partition(":")
    layers, at, path = named.rpartition("@")  # of layers:1,2@DIR
    names = {
        "store": Path(settings["store"]).name,
        "others": [Path(other).name for other in settings["others"]],
        "init": f"{kind}{colon}{layers}{at}{Path(path).name}",
    }
    # The form of this JSON is as in the first release, so that students of all releases are found.
    digest = hashlib.sha256(json.dumps({**chosen, **names}, sort_keys=True).encode()).hexdigest()
    return digest[:6]


def student_folder(parent: Path, settings: Mapping[str, Any], digest: str) -> Path:
    """Return the folder of a student in `parent`: an existing one whose name ends in `digest`, or
    else a new one.

    settings: the settings in a new name. An existing folder may name other settings, if an earlier
        version or a sweep that varied other settings made it.
    """
    room = LONGEST - len(digest) - 1
    words = [word for name, value in settings.items() if (word := _word(name, value))]
    while len(words) > 1 and len("-".join(words)) > room:
        # Not cut, because a number that is cut would be another number. The longest is a list of
        # losses; without it, the other settings, such as the seed, fit.
        words.remove(max(words, key=len))
    # A shell takes it without quotes.
    readable = re.sub(r"[^\w.+@%-]", "_", "-".join(words))[:room].strip("-+._")
    new = parent / f"{readable or 'student'}-{digest}"
    existing = [path for path in sorted(parent.glob(f"[!.]*-{digest}")) if path.is_dir()]
    return existing[0] if existing and new not in existing else new


def _word(name: str, value: Any) -> str:
    """Return a setting as a short word, a path as its last component; "" for False or None."""
    if isinstance(value, bool | None):
        return name if value else ""
    if isinstance(value, Mapping):
        text = "+".join(f"{key}{weight:g}" for key, weight in value.items())
    elif isinstance(value, tuple | list):
        text = ",".join(map(str, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value).rstrip("/")
    short = re.sub(r"[^,:@]*/", "", text).replace(",", ".").replace(":", "")
    return short if name in BY_VALUE else name + short


def path_next_to(store: str, suffix: str) -> Path:
    """Return the path STORE-SUFFIX in the folder of a store. Raises UserError for a remote
    store."""
    if "://" in store:
        raise UserError(f"{store} is not on this machine: give --out as well")
    return Path(store).parent / f"{Path(store).stem}-{suffix}"
