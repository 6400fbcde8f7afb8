"""The formats of exports; each is an entry of `registry.FORMATS`, a `Format`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.arrays import Array

Run = Callable[[dict[str, Array]], Array]
"""From inputs int64 [B,S] by name to the output, [B,...]."""


@dataclass(frozen=True)
class Format:
    """How a format is written, quantised and run.

    names: the file in the folder of an export by quantisation, "" for none; what is not there
    cannot be done.
    write: writes a student in float32 to a path.
    open: makes the function that runs a file, from its path, the output's name and threads.
    layers: names of the parts that can be quantised by the layer of the student that they are of.
    quantise: from a file in float32 to another one: a kind, and the names of the parts.
    """

    names: Mapping[str, str]
    write: Callable[[Any, Path], None]
    open: Callable[[Path, str, int], Run]
    layers: Callable[[Path], dict[str, list[str]]] | None = None
    quantise: Callable[[Path, Path, str, Sequence[str]], None] | None = None
