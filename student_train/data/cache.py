"""Caches of a store for `--cache ram` and `--cache device`, and the check that memory suffices."""

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
from teachonce.student_train.data.batch import StreamedFeatures, TeacherStates, maps_path
from teachonce.student_train.settings.option_values import stays_in_memory
from teachonce.support.arrays import Array, starts
from teachonce.support.errors import UserError

ON_DEVICE = ("hidden", "attention")  # --cache device holds all other feature groups in RAM
GROUPS_OF = {"task": ("classes", "tags")}  # other features have one group of the same name
SHARE = 0.8  # largest share of the free memory for the cache: the training needs the rest


class ResidentFeatures:
    """Holds the encoded states and maps of a whole store in the memory of a device. Each array is
    loaded on first use."""

    resident = ON_DEVICE

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        lengths = store.all_lengths()
        self._token_start, self._square_start = starts(lengths), starts(lengths**2)
        self._tables: dict[str, Tensor] = {}
        # Training batches are prepared in one thread while another validates.
        self._loading = Lock()

    def states(
        self, batch: Batch, view: int, rows: Array, begin: Tensor
    ) -> dict[str, TeacherStates]:
        """Return the same as `StreamedFeatures.states`."""
        sequence = np.searchsorted(batch.start, rows, side="right") - 1
        table_rows = rows + (self._token_start[batch.index] - batch.start[:-1])[sequence]
        codec = self._store.features.level.hidden
        return {
            name: TeacherStates(
                {key: self._table(f"view{view}/hidden/{name}/{key}") for key in codec.names},
                torch.from_numpy(mean),
                torch.from_numpy(deviation),
                codec,
                torch.from_numpy(table_rows),
                begin,
            )
            for name, (mean, deviation) in self._store.calibration.items()
        }

    def maps(self, batch: Batch, view: int) -> tuple[dict[str, Tensor], Array, Elementwise]:
        """Return the same as `StreamedFeatures.maps`."""
        features = self._store.features
        entries = {name: self._table(maps_path(view, name)) for name in features.attention}
        return entries, self._square_start[batch.index], features.level.attention

    def _table(self, path: str) -> Tensor:
        """Return an array of all parts, concatenated. It is loaded on first use."""
        with self._loading:
            if path not in self._tables:
                self._tables[path] = self._load_table(path)
            return self._tables[path]

    def _load_table(self, path: str) -> Tensor:
        store, done = self._store, 0
        counts = [part.counts for part in store.manifest.parts]
        shapes = [part_arrays(store.features, count)[path].shape for count in counts]
        table: Tensor | None = None
        for index, (rows, *row) in enumerate(shapes):
            values = torch.from_numpy(store.part(index).all(path))
            if table is None:
                # Allocated once and filled part by part: concatenating would need the memory twice.
                total = sum(shape[0] for shape in shapes)
                table = torch.empty((total, *row), dtype=values.dtype, device=self._device)
            table[done : done + rows].copy_(values)
            done += rows
        assert table is not None  # a store has parts
        return table


def feature_source(
    store: FeatureStore, cache: str, device: torch.device
) -> StreamedFeatures | ResidentFeatures:
    """Return the object from which a training takes states and maps, for a value of `--cache`."""
    on_device = ON_DEVICE if cache == "device" else ()
    if isinstance(store, FeatureStore):  # other sources of batches have no cache
        # Also without a cache: an earlier training with this open store may have cached arrays.
        cached = (lambda path: _group(path) not in on_device) if stays_in_memory(cache) else None
        store.cache_arrays(cached)
    return ResidentFeatures(store, device) if cache == "device" else StreamedFeatures()


def _group(path: str) -> str:
    """Return the feature group of an array of a part, or "" for an array that is in no view."""
    return path.split("/")[1] if path.startswith("view") else ""


def check_cache(
    cache: str,
    device: torch.device,
    needs: Iterable[tuple[FeatureStore, set[str], set[int]]],
) -> None:
    """Raise UserError if memory does not suffice for `--cache ram` or `--cache device`.

    needs: the stores, each with the kinds of features and the views that a training reads.
    """
    on_device = in_ram = 0
    for store, kinds, views in needs:
        for path, spec in _arrays_read(store, kinds, views):
            if cache == "device" and _group(path) in ON_DEVICE:
                on_device += spec.nbytes
            else:
                in_ram += spec.nbytes
    if device.type == "cuda":
        memory = f"the memory of {torch.cuda.get_device_name(device)}"
        _check_fits(cache, on_device, free_memory_of(device), memory)
    else:
        in_ram += on_device
    _check_fits(cache, in_ram, free_memory(), "the main memory")


def _check_fits(cache: str, needed: int, free: int, memory: str) -> None:
    if needed > SHARE * free:
        other = "--cache ram or none" if cache == "device" else "--cache none"
        raise UserError(
            f"--cache {cache}: the store's features take {needed / 2**30:.2f} GiB of {memory},"
            f" and at most {SHARE:.0%} of the {free / 2**30:.2f} GiB that are free may be used;"
            f" give {other}, one view (--view), or fewer losses"
        )


def _arrays_read(
    store: FeatureStore, kinds: set[str], views: set[int]
) -> Iterable[tuple[str, ArraySpec]]:
    """Yield the path and spec of each array that a training reads."""
    groups = {"mask", *(group for kind in kinds for group in GROUPS_OF.get(kind, (kind,)))}
    read = tuple(f"view{view}/{group}/" for view in views for group in groups)
    for part in store.manifest.parts:
        for path, spec in part_arrays(store.features, part.counts).items():
            if not path.startswith("view") or path.startswith(read):
                yield path, spec


def free_memory_of(device: torch.device) -> int:
    """Return the number of bytes that can still be allocated in a GPU's memory."""
    # torch's allocator retains the memory of freed tensors, such as an earlier training's.
    retained = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + retained


def free_memory() -> int:
    """Return the number of bytes that can still be allocated in main memory, from /proc/meminfo
    and the container's limit. On systems other than Linux, return the machine's whole memory."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError):
        free = _read_sizes(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    container = Path("/sys/fs/cgroup")
    with suppress(OSError, KeyError, ValueError):  # `max` where there is no limit
        limit = int((container / "memory.max").read_text())
        # Only anonymous memory: the page cache counts as well, but is freed when memory is short.
        free = min(free, limit - _read_sizes(container / "memory.stat")["anon"])
    return max(0, free)


def _read_sizes(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
