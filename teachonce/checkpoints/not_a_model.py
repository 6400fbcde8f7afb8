"""Describes what a folder without a config.json is instead of a model, and what to give."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

SCORES = "scores.json"  # of `downstream`, which writes it into every --out folder


def not_a_model(folder: Path) -> str:
    """Return a phrase: what the folder is, and which folder to give in place of it."""
    if not folder.exists():
        return "there is no such folder; check the path"
    inner = sorted(str(each.parent) for each in folder.glob("*/config.json"))
    one = f"give a model in it, such as {inner[0]}" if inner else ""
    if (folder / SCORES).is_file():
        return _results(folder, one)
    if (folder / "runs.json").is_file():
        what = "the folder of a student-sweep, which is no model"
        return f"{what}; {one or 'continue the sweep: it has no finished student'}"
    if (folder / "training.json").is_file():
        return (
            "no config.json in it: a training that is not finished; wait for it, or continue it by"
            " the same command with --resume"
        )
    return f"no config.json in it; {one or 'give a folder that save_pretrained wrote'}"


def _results(folder: Path, one: str) -> str:
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        found = dict(json.loads((folder / SCORES).read_text("utf-8")))
    task = f" --task {found['task']}" if isinstance(found.get("task"), str) else ""
    what = f"the results of `downstream{task}` ({SCORES}), not a model"
    if one:
        return f"{what}; {one}"
    with suppress(KeyError, TypeError, IndexError):
        if "best_epoch" in found["seeds"][0]:
            return f"{what}: the fine-tuned one was not saved; fine-tune again with --save"
    model = found.get("model")
    which = f", {model}" if isinstance(model, str) else ""
    return f"{what}; give the model that was scored{which:.200}"
