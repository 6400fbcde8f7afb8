"""The name of a student's folder, and where it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError


def folder_name(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Join the main settings of a training, as it describes itself, with a short hash of those that
    were `chosen`.

    Of a store only its name counts: spelled otherwise, or moved, it is the same store.
    """
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
    return "-".join(main).replace(",", ".").replace(":", "")


def beside(store: str, what: str) -> Path:
    """Return the folder STORE-WHAT beside a store; raise UserError if the store is not on this
    machine."""
    if "://" in store:
        raise UserError(f"{store} is not on this machine: give --out, too")
    return Path(store).parent / f"{Path(store).stem}-{what}"
