"""The name and location of a student's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError


def folder_name(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Join the main settings of a training with a short hash of `chosen`.

    settings: the result of `TrainOptions.describing`.
    chosen: the settings that are not at their default.
    """
    # Only the last path component of a store enters the hash: a store that was moved, or is spelled
    # as a relative path, gives the same folder.
    loss = "+".join(f"{name}{weight:g}" for name, weight in settings["loss"].items())
    kind, colon, named = settings["init"].partition(":")
    start = f"{kind}{colon}{Path(named).name}"
    names = {
        "store": Path(settings["store"]).name,
        "others": [Path(other).name for other in settings["others"]],
        "init": start,
    }
    digest = hashlib.sha256(json.dumps({**chosen, **names}, sort_keys=True).encode()).hexdigest()
    main = (
        Path(settings["vocab"]).name,
        settings["student"],
        settings["align"],
        loss,
        start,
        f"seed{settings['seed']}",
        digest[:6],
    )
    name = "-".join(main).replace(",", ".").replace(":", "")
    return re.sub(r"[^\w.+@%=-]", "_", name)  # such as blanks: a shell takes it without quotes


def path_next_to(store: str, suffix: str) -> Path:
    """Return the path STORE-SUFFIX in the folder of a store. Raises UserError for a remote
    store."""
    if "://" in store:
        raise UserError(f"{store} is not on this machine: give --out as well")
    return Path(store).parent / f"{Path(store).stem}-{suffix}"
