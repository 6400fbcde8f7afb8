"""The formats of exports; each is an `ExportFormat` in `registry.FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.arrays import Array

Runner = Callable[[dict[str, Array]], Array]
"""Takes inputs int64 [B,S] by name, returns the output [B,...]."""


@dataclass(frozen=True)
class ExportFormat:
    """The functions that write, quantise and run a format.

    names: the path in the export's folder for each quantisation, "" for float32. A quantisation
    without a path is not supported.
    write: `write(student, path)` writes the student in float32.
    open: `open(path, output, threads)` returns the `Runner` of a file.
    layers: `layers(path)` returns the names of the nodes that can be quantised, by layer.
    quantise: `quantise(source, path, kind, nodes)` writes a copy with these nodes quantised.
    """

    names: Mapping[str, str]
    write: Callable[[Any, Path], None]
    open: Callable[[Path, str, int], Runner]
    layers: Callable[[Path], dict[str, list[str]]] | None = None
    quantise: Callable[[Path, Path, str, Sequence[str]], None] | None = None
