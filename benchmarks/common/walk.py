"""Runs a command under Python's profiler and prints the functions of the project that it passes.

    PYTHONPATH=TREE python -P benchmarks/common/walk.py TREE dump|train WORDS...

TREE is a checkout of any version. This file imports nothing else of the project, so that the
version is the one at TREE.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OUTSIDE = ("tests", "benchmarks", "examples", "docs")  # folders of a checkout, not of the product
COUNTED = ("open_store", "TrainOptions.__post_init__", "check_value")
FOREIGN = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "accelerate",
    "zarr",
)
IDLE = 0.5  # seconds until the main thread only waits for the batch
OPTIMIZED = 1  # a flag of each function's code; the bodies of modules and classes lack it


class Walk:
    """Collects the functions of the project at `tree` that are called, resumed or returned from.

    `walks` maps a name to its functions, each a file and a qualified name. A thread takes part in
    the walk that `threads` gives for it, all others in `everywhere`. `watch` sees each event first
    and opens and closes walks.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = f"{tree.resolve()}{os.sep}"
        self._names = dict[CodeType, tuple[str, str] | None]()
        self.walks = dict[str, set[tuple[str, str]]]()
        self.calls = Counter[str]()
        self.threads, self.everywhere = dict[int, str](), ""
        self.watch: Callable[[FrameType, str, Any], None] = ignore

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Take an event of the profiler."""
        if event not in ("call", "return") or (name := self.name(frame)) is None:
            return
        self.watch(frame, event, value)
        if walk := self.threads.get(threading.get_ident(), self.everywhere):
            self.walks.setdefault(walk, set()).add(name)
            if event == "call" and name[1] in COUNTED:
                self.calls[name[1]] += 1

    def name(self, frame: FrameType) -> tuple[str, str] | None:
        """Return the file, from `tree`, and the qualified name of a function; None if it is not of
        the project, or a lambda or comprehension."""
        code = frame.f_code
        if code not in self._names:
            file = os.path.realpath(code.co_filename)
            inside = file.removeprefix(self._tree)
            named = code.co_flags & OPTIMIZED and not code.co_name.startswith("<")
            written = inside != file and not code.co_filename.startswith("<")
            product = written and inside.split(os.sep)[0] not in OUTSIDE
            self._names[code] = (inside, code.co_qualname) if named and product else None
        return self._names[code]

    def leaves_store(self, frame: FrameType) -> bool:
        """Whether a function of the package `store` was called by another package."""
        return self._in_store(frame) and not self._in_store(frame.f_back)

    def _in_store(self, frame: FrameType | None) -> bool:
        name = None if frame is None else self.name(frame)
        return name is not None and "store" in Path(name[0]).parts[:2]


def ignore(frame: FrameType, event: str, value: Any) -> None:
    """Do nothing."""


def watch_dump(walk: Walk) -> None:
    """Open the walk `dump` when the corpus yields its first document."""

    def watch(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and type(value).__name__ == "Document":
            walk.everywhere, walk.watch = "dump", ignore

    walk.watch = watch


def watch_training(walk: Walk) -> None:
    """Open the walk `start`; when the first batch leaves the store, open `batch` instead, until the
    first gradients are computed.

    A thread that reads batches takes part in `batch` until it reads the next one.
    """
    import torch

    main, reader = threading.get_ident(), list[FrameType]()
    walk.everywhere = "start"
    backward: Any = torch.Tensor.backward

    def watch(frame: FrameType, event: str, value: Any) -> None:
        if reader:
            if event == "call" and frame is reader[0] and threading.get_ident() != main:
                walk.threads.pop(threading.get_ident(), None)
        elif event == "return" and type(value).__name__ == "Batch" and walk.leaves_store(frame):
            reader.append(frame)
            if threading.get_ident() != main:
                time.sleep(IDLE)
            walk.everywhere = ""
            walk.threads = dict.fromkeys((main, threading.get_ident()), "batch")

    def stop(*arguments: Any, **named: Any) -> Any:
        walk.threads.clear()
        return backward(*arguments, **named)

    walk.watch = watch
    torch.Tensor.backward = stop  # type: ignore[method-assign]


def run(tree: Path, command: str, words: list[str]) -> Walk:
    """Run a command of the version at `tree`."""
    for module in FOREIGN:  # under the profiler their import takes three times as long
        with suppress(ImportError):
            import_module(module)
    prefix = "teachonce." if (tree / "teachonce/store").exists() else ""
    package, watch = {
        "dump": ("teacher_dump", watch_dump),
        "train": ("student_train", watch_training),
    }[command]
    main = import_module(f"{prefix}{package}.cli").main
    walk = Walk(tree)
    watch(walk)
    threading.setprofile(walk)
    sys.setprofile(walk)
    main(words, standalone_mode=False)
    sys.setprofile(None)
    return walk


if __name__ == "__main__":
    walk = run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    print(json.dumps([{name: sorted(walk.walks[name]) for name in walk.walks}, walk.calls]))
