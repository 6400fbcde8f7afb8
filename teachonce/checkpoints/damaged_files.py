"""Finds the file of a checkpoint that cannot be read: libraries do not name it in their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teachonce.support.errors import first_line

SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
"""JSON files of a checkpoint, each an object; any may be missing."""


def damaged_file(folder: Path) -> str:
    """Return the name of a damaged file of a checkpoint and what is wrong with it; "" if all of its
    files can be read, or if it is not in a folder."""
    names = [name for name in (*SETTINGS, "tokenizer.json") if (folder / name).is_file()]
    for path in (*(folder / name for name in names), *sorted(folder.glob("*.safetensors"))):
        if why := _flaw(path):
            return f"{path.name} {why}"
    return ""


def _flaw(path: Path) -> str:
    try:
        if path.stat().st_size == 0:
            return "is empty"
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            # This reads the header and compares its sizes with the file's length; no tensor is
            # loaded.
            with safe_open(path, framework="np"):
                return ""
        found: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            return "is not a JSON object"
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer

            Tokenizer.from_file(str(path))
    except UnicodeDecodeError:
        return "is damaged (not UTF-8)"
    except Exception as error:  # libraries raise errors of any type for a bad file
        return f"is damaged ({first_line(error)})"
    return ""
