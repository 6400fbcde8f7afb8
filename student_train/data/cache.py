"""The source of a batch's teacher states and maps: the stream, or a copy of the store on the
device. The module also checks that memory suffices for a copy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from teachonce.store import Batch, FeatureStore
from teachonce.store.format.codecs.codec import Elementwise
from teachonce.store.format.layout import ArraySpec, part_arrays
from teachonce.student_train.data.batch import Streamed, TeacherStates, maps_path
from teachonce.student_train.settings.option_values import stays_in_memory
from teachonce.support.arrays import Array, starts
from teachonce.support.errors import UserError

ON_DEVICE = ("hidden", "attention")  # groups of a view; --cache device keeps others in RAM
GROUPS_OF = {"task": ("classes", "tags")}  # groups of other kinds have the kind's name
SHARE = 0.8  # of the free memory, for a cache; a training takes some, too


class Resident:
    """Keeps states and maps of a whole store, encoded, in the memory of a device from first use
    on."""

    resident = ON_DEVICE

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        lengths = store.all_lengths()
        self._token_start, self._square_start = starts(lengths), starts(lengths**2)
        self._tables: dict[str, Tensor] = {}
        self._loading = Lock()  # training reads ahead in a thread while it validates in another

    def states(
        self, batch: Batch, view: int, rows: Array, begin: Tensor
    ) -> dict[str, TeacherStates]:
        """Return what `Streamed.states` does."""
        sequence = np.searchsorted(batch.start, rows, side="right") - 1
        there = rows + (self._token_start[batch.index] - batch.start[:-1])[sequence]
        codec = self._store.features.level.hidden
        return {
            name: TeacherStates(
                {key: self._table(f"view{view}/hidden/{name}/{key}") for key in codec.names},
                torch.from_numpy(mean),
                torch.from_numpy(deviation),
                codec,
                torch.from_numpy(there),
                begin,
            )
            for name, (mean, deviation) in self._store.calibration.items()
        }

    def maps(self, batch: Batch, view: int) -> tuple[dict[str, Tensor], Array, Elementwise]:
        """Return what `Streamed.maps` does."""
        features = self._store.features
        entries = {name: self._table(maps_path(view, name)) for name in features.attention}
        return entries, self._square_start[batch.index], features.level.attention

    def _table(self, path: str) -> Tensor:
        """Return an array of the store, its parts one after another; load it at first use."""
        with self._loading:
            if path not in self._tables:
                self._tables[path] = self._loaded(path)
            return self._tables[path]

    def _loaded(self, path: str) -> Tensor:
        store, done = self._store, 0
        counts = [part.counts for part in store.manifest.parts]
        shapes = [part_arrays(store.features, count)[path].shape for count in counts]
        table: Tensor | None = None
        for place, (rows, *row) in enumerate(shapes):
            values = torch.from_numpy(store.part(place).all(path))
            if table is None:
                total = sum(shape[0] for shape in shapes)
                table = torch.empty((total, *row), dtype=values.dtype, device=self._device)
            table[done : done + rows].copy_(values)
            done += rows
        assert table is not None  # a store has parts
        return table


def source_of(store: FeatureStore, cache: str, device: torch.device) -> Streamed | Resident:
    """Choose the source of a training's states and maps by the word of `--cache`."""
    apart = ON_DEVICE if cache == "device" else ()
    if isinstance(store, FeatureStore):  # other sources of batches keep nothing
        # Also to keep nothing: an earlier training may have kept arrays.
        keeps = (lambda path: _group(path) not in apart) if stays_in_memory(cache) else None
        store.cache_arrays(keeps)
    return Resident(store, device) if cache == "device" else Streamed()


def _group(path: str) -> str:
    """Return the group of a view that an array of a part belongs to; "" for an array of no view."""
    return path.split("/")[1] if path.startswith("view") else ""


def check_cache(
    cache: str,
    device: torch.device,
    needs: Iterable[tuple[FeatureStore, set[str], set[int]]],
) -> None:
    """Check that memory suffices for `--cache`, or raise UserError. `needs` lists the stores that
    are read, each with the kinds of features and the views."""
    if not stays_in_memory(cache):
        return
    on_device = in_ram = 0
    for store, kinds, views in needs:
        for path, spec in _read(store, kinds, views):
            if cache == "device" and _group(path) in ON_DEVICE:
                on_device += spec.nbytes
            else:
                in_ram += spec.nbytes
    if device.type == "cuda":
        where = f"the memory of {torch.cuda.get_device_name(device)}"
        _check_fits(cache, on_device, free_memory_of(device), where)
    else:
        in_ram += on_device
    _check_fits(cache, in_ram, free_memory(), "the main memory")


def _check_fits(cache: str, needed: int, free: int, where: str) -> None:
    if needed > SHARE * free:
        other = "--cache ram or none" if cache == "device" else "--cache none"
        raise UserError(
            f"--cache {cache}: what is read of the store takes {needed / 2**30:.2f} GiB of {where},"
            f" and of its {free / 2**30:.2f} GiB that are free at most {SHARE:.0%} are taken; give"
            f" {other}, one view (--view), or fewer losses"
        )


def _read(store: FeatureStore, kinds: set[str], views: set[int]) -> Iterable[tuple[str, ArraySpec]]:
    """Yield path and spec of each array that a training reads."""
    groups = {"mask", *(group for kind in kinds for group in GROUPS_OF.get(kind, (kind,)))}
    read = tuple(f"view{view}/{group}/" for view in views for group in groups)
    for part in store.manifest.parts:
        for path, spec in part_arrays(store.features, part.counts).items():
            if not path.startswith("view") or path.startswith(read):
                yield path, spec


def free_memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that can still be taken. Bytes that torch keeps of tensors
    that are gone, such as an earlier training's, count as free."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def free_memory() -> int:
    """Return the bytes of main memory that can still be taken, as Linux and its container report
    them; elsewhere all bytes of the machine."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError):
        free = _told(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    container = Path("/sys/fs/cgroup")
    with suppress(OSError, KeyError, ValueError):  # `max` where there is no limit
        limit = int((container / "memory.max").read_text())
        free = min(free, limit - _told(container / "memory.stat")["anon"])
    return max(0, free)


def _told(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
