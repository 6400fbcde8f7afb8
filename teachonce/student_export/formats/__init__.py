"""The formats of exports; each is an `ExportFormat` in `registry.FORMATS`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.support.arrays import Array

Runner = Callable[[dict[str, Array]], Array]
"""Takes inputs int64 [B,S] by name, returns the output [B,...]."""


@dataclass(frozen=True)
class ExportFormat:
    """Holds the functions that write, quantise and run a format.

    names: the path in the export's folder for each quantisation, "" for float32. A quantisation
        without a path is not supported.
    write: `write(student, path)` writes the student in float32.
    open: `open(path, output, threads)` returns the `Runner` of a file.
    runner: the module that runs a file, and the package that contains it.
    layers: `layers(path)` returns the names of the nodes that can be quantised, by layer.
    quantise: `quantise(source, path, kind, nodes)` writes a copy with these nodes quantised, and
        returns the nodes that it cannot quantise.
    tokens: `tokens(path, texts)` returns the token ids of texts, for a format with a tokenizer of
        its own.
    per_batch: the quantisations that scale the activations of a whole batch at once, so that a
        text's output depends on the other texts.
    layers_are_modules: whether `layers` has the names of the network's modules.
    usage: `usage(file, chats)` returns Markdown that shows how to run a file, for the model card;
        `chats`: whether a decoder was trained on chats. If `usage` is missing, and for encoders in
        a format that also exports decoders, the card has a program that uses NumPy and tokenizers.
    """

    names: Mapping[str, str]
    write: Callable[[Any, Path], None]
    open: Callable[[Path, str, int], Runner]
    runner: tuple[str, str]
    layers: Callable[[Path], dict[str, list[str]]] | None = None
    quantise: Callable[[Path, Path, str, Sequence[str]], Sequence[str]] | None = None
    tokens: Callable[[Path, Sequence[str]], list[list[int]]] | None = None
    usage: Callable[[str, bool], str] | None = None
    per_batch: tuple[str, ...] = ()
    layers_are_modules: bool = False

    def runs(self) -> bool:
        """Return whether the module that runs a file is installed."""
        return importlib.util.find_spec(self.runner[0]) is not None

    def open_repeatable(self, path: Path, output: str, threads: int) -> Runner:
        """Return the `Runner` of a file. Its output for a text is the same in every batch."""
        run = self.open(path, output, threads)
        names = [Path(self.names[kind]).name for kind in self.per_batch]
        return _one_by_one(run) if path.name in names else run


def _one_by_one(run: Runner) -> Runner:
    """Return a `Runner` that runs each text of a batch alone, without its padding."""

    def alone(inputs: dict[str, Array]) -> Array:
        outputs, present = list[Array](), inputs["attention_mask"].astype(bool)
        present[~present.any(1), :1] = True  # some graphs cannot run without a token
        for n, mask in enumerate(present):
            outputs.append(run({name: array[n : n + 1, mask] for name, array in inputs.items()})[0])
        if outputs[0].ndim == 1:
            return np.stack(outputs)
        padded = np.zeros((*present.shape, outputs[0].shape[-1]), outputs[0].dtype)
        padded[present] = np.concatenate(outputs)
        return padded

    return alone
