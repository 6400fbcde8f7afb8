"""Read hidden states of speculators and SpecForge, which write a file for each sample.

After src/speculators/train/data.py and data_generation/offline.py of
github.com/vllm-project/speculators, commit c05b95b (`hs_<i>.safetensors`), and
scripts/prepare_hidden_states.py of github.com/sgl-project/SpecForge, commit a6b6b02
(`rows_*/data_<i>.ckpt`, optionally .gz). Only tensors are read; no pickled code is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import gunzip, numbered, regular
from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample
from teachonce.feature_store.captures.schema import Numbers, checked
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.feature_store.captures.tensors import load_safetensors, load_tensors
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.layer_groups import BEFORE_NORM


@dataclass(frozen=True, eq=False)
class Captured:
    """Holds the token ids int64 [T] of a file, and its states float32 [T,D], a tensor per layer.

    default_layers: whether a capture in this form has the tool's default layers if --layers is not
        given.
    """

    ids: Array
    states: list[Floats]
    default_layers: bool = True


@dataclass(frozen=True)
class StatesFormat:
    """Defines a format of files with states: how they are found and read.

    normed: whether the last layer is captured after the final norm.
    """

    name: str
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, TeacherFiles], Captured]
    normed: bool


def _speculators_files(source: Path) -> list[Path]:
    folders = (source, source / "hidden_states")
    return numbered(path for folder in folders for path in folder.glob("hs_*.safetensors"))


def _specforge_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source] if source.name.endswith((".ckpt", ".ckpt.gz")) else []
    return numbered([*source.rglob("data_*.ckpt"), *source.rglob("data_*.ckpt.gz")])


IDS = Numbers("token_ids", "ids", ("tokens",), batched=True)
SPECULATORS_FIELDS = (IDS, Numbers("hidden_states", "states", ("tokens", "layers", "width")))
SPECFORGE_IDS = Numbers("input_ids", "ids", ("tokens",), batched=True)
LOSS_MASK = Numbers("loss_mask", "mask", ("tokens",), optional=True, batched=True)


def _read_speculators(path: Path, teacher: TeacherFiles) -> Captured:
    arrays = checked(SPECULATORS_FIELDS, load_safetensors(path), str(path))
    states = arrays["hidden_states"]
    return Captured(arrays["token_ids"], [states[:, n] for n in range(states.shape[1])])


def _read_specforge(path: Path, teacher: TeacherFiles) -> Captured:
    tensors = load_tensors(gunzip(path) if path.suffix == ".gz" else path, str(path))
    last = "hidden_state" if "hidden_state" in tensors else "target_last_hidden_states"
    aux = "aux_hidden_state" if "aux_hidden_state" in tensors else "hidden_states"
    # SpecForge saves the states of a sample as a batch of one.
    fields = (
        SPECFORGE_IDS,
        LOSS_MASK,
        Numbers(last, "states", ("tokens", "width"), optional=True, batched=True),
        Numbers(aux, "states", ("tokens", "widths of the layers"), batched=True),
    )
    arrays = checked(fields, tensors, str(path))
    # SpecForge concatenates the states of the chosen layers along the width.
    layers, ids = arrays[aux], arrays[SPECFORGE_IDS.name]
    width = arrays[last].shape[1] if last in arrays else teacher.width
    if not width or layers.shape[1] % width:
        raise UserError(
            f"{path}: {aux} has width {layers.shape[1]}, which is not a multiple of the teacher's"
            f" hidden size {width or '(unknown)'}; give the teacher's own folder by --tokenizer"
        )
    states = [*np.split(layers, layers.shape[1] // width, axis=1)]
    states += [arrays[last]] if last in arrays else []
    length = _without_padding(ids, arrays.get(LOSS_MASK.name), teacher)
    if not length:
        raise UserError(f"{path}: holds only padding; remove this sample")
    # Only captures for EAGLE3 have this key; DFlash, Domino and DSpark choose other layers.
    eagle = "hidden_state" in tensors
    states = [state[:length] for state in states]
    return Captured(ids[:length], states, default_layers=eagle)


def _without_padding(ids: Array, mask: Array | None, teacher: TeacherFiles) -> int:
    """Count the tokens before the padding, which SpecForge captures as well."""
    # An id of 0 may be a token of the text: it is padding only where the loss mask is 0 as well.
    padding = {0, teacher.tokenizer.pad_token_id}
    length = len(ids)
    while length and int(ids[length - 1]) in padding and (mask is None or not mask[length - 1]):
        length -= 1
    return length


class HiddenFiles:
    """Reads a folder of files with states."""

    def __init__(self, kind: StatesFormat, options: ImportOptions, teacher: TeacherFiles) -> None:
        self._kind, self._teacher = kind, teacher
        self._files = regular(kind.files(options.source))
        if not self._files:
            raise UserError(
                f"{options.source}: no file of {kind.name} in it; check the path and --format"
            )
        first = kind.read(self._files[0], teacher)
        names = self._names(options, first)
        width = int(first.states[0].shape[1])
        self.contents = CaptureContents(hidden=names, width=width, vocabulary=teacher.vocabulary)
        self.settings: dict[str, Any] = {"layers": ",".join(names)}

    def _names(self, options: ImportOptions, first: Captured) -> tuple[str, ...]:
        """Return the names of the captured layers as features of a store, such as `layer2`."""
        depth = self._teacher.layers
        if depth is None:
            raise UserError(
                f"--tokenizer {options.tokenizer}: it has no config.json with the teacher's number"
                " of layers; give the teacher's own folder"
            )
        layers, count = options.layers, len(first.states)
        # The default of both tools. SpecForge writes the first three as 1, L/2 - 1 and L - 4,
        # because it counts layers from 0.
        default = (2, depth // 2, depth - 3, depth)
        if not layers and first.default_layers and count == len(default):
            layers = default
        fits = len(set(layers)) == len(layers) == count and all(0 <= n <= depth for n in layers)
        if not fits:
            given = f" {','.join(map(str, options.layers))}" if options.layers else ""
            raise UserError(
                f"--layers{given}: {self._files[0]} holds {count} states of a teacher with {depth}"
                f" layers; name {count} different layers in their order, from 0 (the output of the"
                f" embeddings) to {depth} (the last layer)"
            )
        last = f"layer{depth}{'' if self._kind.normed else BEFORE_NORM}"
        return tuple(last if layer == depth else f"layer{layer}" for layer in layers)

    def files(self) -> list[Path]:
        return self._files

    def samples(self) -> Iterator[Sample]:
        """Yield the sample of each file."""
        # `_rows` reads the file again: the states of all samples need not fit into memory.
        for path in self._files:
            yield Sample(str(path), partial(self._rows, path), self._read(path).ids)

    def _read(self, path: Path) -> Captured:
        captured = self._kind.read(path, self._teacher)
        if len(captured.states) != len(self.contents.hidden):
            raise UserError(
                f"{path}: holds {len(captured.states)} states, and {self._files[0]}"
                f" {len(self.contents.hidden)}; remove the files of another capture"
            )
        for state in captured.states:
            if state.shape[1] != self.contents.width:
                raise UserError(
                    f"{path}: the hidden size is {state.shape[1]}, and in {self._files[0]}"
                    f" {self.contents.width}; remove the files of another capture"
                )
        return captured

    def _rows(self, path: Path) -> Rows:
        return Rows(hidden=dict(zip(self.contents.hidden, self._read(path).states, strict=True)))


def _format(kind: StatesFormat) -> Format:
    return Format(
        kind.name,
        lambda path: bool(kind.files(path)),
        partial(HiddenFiles, kind),
        frozenset({"layers", "model"}),
    )


SPECULATORS = _format(
    StatesFormat("speculators", _speculators_files, _read_speculators, normed=False)
)
SPECFORGE = _format(StatesFormat("specforge", _specforge_files, _read_specforge, normed=True))
