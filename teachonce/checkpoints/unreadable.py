"""Describes why a checkpoint cannot be read: a damaged file, which the errors of libraries do not
name, or a folder that is something else than a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line, out_of_memory

JSON_FILES = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "model.safetensors.index.json",
)  # fmt: skip
"""JSON files of a checkpoint, each an object; any may be missing."""
SCORES = "scores.json"  # of `downstream`, which writes it into every --out folder


@contextmanager
def folder_errors(problem: str) -> Iterator[None]:
    """Raise UserError, which begins with `problem`, for every error except a lack of memory."""
    try:
        yield
    except Exception as error:  # libraries raise errors of any type for a bad file
        if out_of_memory(error):
            raise
        raise UserError(f"{problem}: {first_line(error)}; copy the whole folder") from error


def damaged_file(folder: Path) -> str:
    """Return the name of a damaged file of a checkpoint, and what is wrong with the file; "" if all
    files can be read, or if the folder does not exist."""
    names = [name for name in (*JSON_FILES, "tokenizer.json") if (folder / name).is_file()]
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
        content: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            return "is not a JSON object"
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer

            Tokenizer.from_file(str(path))
    except UnicodeDecodeError:
        return "is damaged (not UTF-8)"
    except Exception as error:  # libraries raise errors of any type for a bad file
        return f"is damaged ({first_line(error)})"
    return ""


def not_a_model(folder: Path) -> str:
    """Describe what a folder without a model is, and which folder to give in its place."""
    if not folder.exists():
        return "there is no such folder; check the path"
    if not folder.is_dir():
        inside = any((folder.parent / name).is_file() for name in JSON_FILES)
        remedy = f"its folder, {folder.parent}" if inside else "a folder that save_pretrained wrote"
        return f"is a file; give {remedy}"
    inner = sorted(str(path.parent) for path in folder.glob("*/config.json"))
    one = f"give a model in it, such as {inner[0]}" if inner else ""
    if (folder / SCORES).is_file():
        return _results(folder, one)
    if (folder / "runs.json").is_file():
        subject = "the folder of a student-sweep, which is not a model"
        return f"{subject}; {one or 'continue the sweep: it has no finished student'}"
    if (folder / "training.json").is_file():
        return (
            "no config.json in it: a training that is not finished; wait for it, or continue it by"
            " the same command with --resume"
        )
    return f"no config.json in it; {one or 'give a folder that save_pretrained wrote'}"


def _results(folder: Path, one: str) -> str:
    scores: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        scores = dict(json.loads((folder / SCORES).read_text("utf-8")))
    task = f" --task {scores['task']}" if isinstance(scores.get("task"), str) else ""
    description = f"the results of `downstream{task}` ({SCORES}), not a model"
    if one:
        return f"{description}; {one}"
    with suppress(KeyError, TypeError, IndexError):
        if "best_epoch" in scores["seeds"][0]:
            return f"{description}: the fine-tuned one was not saved; fine-tune again with --save"
    model = scores.get("model")
    which = f", {model}" if isinstance(model, str) else ""
    return f"{description}; give the model that was scored{which:.200}"
