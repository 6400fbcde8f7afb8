"""Describe what a path without a store is instead, and what to do with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from teachonce.store.errors import NO_STORE, StoreError

OPENED = 512  # bytes of a file that are looked at
SHOWN = 3  # names of stores in a folder
DUMP = "a store is written by `teacher-dump --model MODEL --corpus CORPUS --out NAME.zarr`"


def not_a_store(path: Path) -> StoreError:
    """Return the error for a file or folder without a store: what it is, and what to do next."""
    problem, remedy = _folder(path) if path.is_dir() else _file(path)
    return StoreError(f"{path}: not a feature store ({problem}); {remedy}")


def _folder(path: Path) -> tuple[str, str]:
    typed = shlex.quote(str(path))
    if (path / "config.json").is_file() or (path / "modules.json").is_file():
        return "the folder of a model", (
            "give the store that a teacher wrote: `teacher-dump"
            f" --model {typed} --corpus CORPUS --out NAME.zarr`, if this model is the teacher"
        )
    if (path / "runs.json").is_file():
        return "the folder of a sweep", "give the store that its students are trained on"
    if (path / "training.json").is_file():
        return "the folder of a training", "give the store that the student is trained on"
    if path.name.endswith(".h5.parts"):
        store = path.with_name(path.name.removesuffix(".parts"))
        return "the parts of an unfinished store", f"give {store}"
    if re.search(r"\.aside-\d+$", path.name):
        return "the quarantine folder of a repair", "give the store itself"
    if (path / "parts").is_dir():  # only the root is missing, as in a copy that was stopped
        return "a folder without zarr.json", NO_STORE
    stores = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".zarr", ".h5"))
    if stores:
        dots = " ..." if len(stores) > SHOWN else ""
        return f"a folder with {', '.join(stores[:SHOWN])}{dots}", "give one of these"
    return "a folder without zarr.json", NO_STORE if path.suffix == ".zarr" else DUMP


def _file(path: Path) -> tuple[str, str]:
    if not path.is_file():  # opening a pipe waits for its writer
        return "neither a folder nor an ordinary file", DUMP
    if path.suffix == ".h5":
        return "neither a Zarr folder nor HDF5", NO_STORE
    with path.open("rb") as file:
        start = file.read(OPENED)
    if path.name == "zarr.json":
        return "a file of a store", f"give its folder, {path.parent}"
    if start and _is_text(start):
        typed = shlex.quote(str(path))
        return (
            "a text file",
            f"`teacher-dump --model MODEL --corpus {typed} --out NAME.zarr` makes a store from it",
        )
    return "neither a Zarr folder nor HDF5", DUMP


def _is_text(start: bytes) -> bool:
    text = start.decode("utf-8", "replace").rstrip("\N{REPLACEMENT CHARACTER}")  # a cut last letter
    return "\0" not in text and "\N{REPLACEMENT CHARACTER}" not in text
