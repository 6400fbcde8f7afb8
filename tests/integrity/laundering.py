"""Damage that only the manifest can detect: every command that copies such a store must refuse it,
since a copy has new checksums."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import h5py
import numpy as np
import zarr

from teachonce.store import StoreError, open_store
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import outside_entries
from teachonce.support.arrays import Array
from tests.integrity.damage import FORMATS, small_store
from tests.integrity.support import is_finished, remove
from tests.making.stores import copied

IN_MEMORY = "memory://laundered/store.zarr"


def alter(store: Path, name: str) -> None:
    """Change the bytes of an array's first row to valid values with a valid container checksum."""
    if store.is_dir():
        array = zarr.open_array(store / name, mode="r+", zarr_format=3)
        array[:1] = _other(np.asarray(array[:1]))
        return
    with h5py.File(store, "r+") as file:
        file[name][:1] = _other(file[name][:1])
    append_digest(store)


def _other(values: Array) -> Array:
    """Flip the lowest bit of each number."""
    bits = values.view(f"u{values.dtype.itemsize}") if values.dtype != bool else values
    changed: Array = (bits ^ bits.dtype.type(1)).view(values.dtype)
    return changed


def _streamed(store: Path, target: Path, sound: Path) -> None:
    """Read as a training does: every view, with checks."""
    with closing(open_store(store)) as opened:
        for view in range(opened.features.views):
            for batch in opened.stream(view=view, check=True):
                assert len(batch)


COPIES: dict[str, Callable[[Path, Path, Path], object]] = {
    "convert to Zarr": lambda store, target, sound: convert(store, target / "a.zarr"),
    "convert to HDF5": lambda store, target, sound: convert(store, target / "a.h5"),
    "convert --codec": lambda store, target, sound: convert(store, target / "b.h5", codec="small"),
    "merge": lambda store, target, sound: merge([sound, store], target / "c.zarr", recode=False),
    "merge --recode": lambda store, target, sound: merge(
        [sound, store], target / "d.h5", recode=True
    ),
    "upload": lambda store, target, sound: upload(store, IN_MEMORY),
    "training": _streamed,
}


def laundered(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Alter `count` arrays and copy each in one way; yield the change, and the line of refusal (""
    if there was none, or if a finished store was written)."""
    chance = random.Random(seed)
    sound = {ext: small_store(folder / f"sound.{ext}", codec="default") for ext in FORMATS}
    names = {}
    for ext, path in sound.items():
        with closing(open_store(path)) as store:
            listed = [*outside_entries(store)]
            for part in store.manifest.parts:
                listed += [(f"parts/{part.number}/{n}", entry) for n, entry in part.arrays.items()]
            names[ext] = [name for name, entry in listed if entry.shape[0]]
    cases = [
        (ext, way, name)
        for ext in FORMATS
        for way in COPIES
        for name in names[ext]
        if _reads(way, name, ext)
    ]
    for ext, way, name in chance.sample(cases, min(count, len(cases))):
        copy, target = folder / f"altered.{ext}", folder / "target"
        target.mkdir()
        alter(copied(sound[ext], copy), name)
        yield (
            f"{ext}: {way} of a store with another {name}",
            _refusal(way, copy, target, sound[ext]),
        )
        remove(target, copy)


def _reads(way: str, name: str, ext: str) -> bool:
    """Return whether a way of copying reads an array. Merged stores take arrays outside of parts
    from the first store; training reads the parts and the calibration."""
    inside = name.startswith("parts/")
    if way == "upload":
        return ext == "zarr"
    return inside or way.startswith("convert")


def _refusal(way: str, store: Path, target: Path, sound: Path) -> str:
    try:
        COPIES[way](store, target, sound)
    except StoreError as error:
        files = fsspec.filesystem("memory")
        sealed = [path for path in target.iterdir() if is_finished(path)]
        if files.exists(IN_MEMORY) or sealed:
            return ""
        return str(error)
    return ""
