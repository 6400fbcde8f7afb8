"""The folder of this user's caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$TEACHONCE_CACHE`, else `teachonce` in the user's cache folder.

    Raises FileNotFoundError if the user has no home, as in many containers.
    """
    if os.environ.get("TEACHONCE_CACHE"):
        return Path(os.environ["TEACHONCE_CACHE"])
    try:
        # The XDG specification requires that an empty variable counts as unset.
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "teachonce"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder") from error
