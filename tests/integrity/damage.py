"""Damaged and sound stores, which `feature-store verify` must distinguish."""

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import h5py

from teachonce.store import Features, StoreError
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.tools.verify import verify
from tests.integrity.support import remove
from tests.making.stores import TOKENIZER, copied, features_of, make_store

FORMATS = ("zarr", "h5")
Damage = Callable[[Path], object]


def small_store(path: Path, parts: int = 2, sequences: int = 4, **changes: Any) -> Path:
    """Make a sealed store with two views, hidden states, attention maps and logits."""
    features = dataclasses.replace(features_of("default", "topk"), **changes)
    make_store(path, features, parts=parts, sequences=sequences)
    return path


def problems(path: Path) -> list[str]:
    """Return the problems and unknown items that verify reports; failure to open is a problem."""
    try:
        report = verify(path)
        return [*report.problems, *report.unknown]
    except StoreError as error:
        return [str(error)]


def files_of(path: Path) -> list[Path]:
    """Return the files of a store, in a fixed order."""
    return [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())


def flip(file: Path, byte: int, bit: int) -> None:
    """Flip one bit of a file in place; a second call restores it."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0] ^ (1 << bit)
        opened.seek(byte)
        opened.write(bytes([value]))


def flip_in(store: Path, array: str, byte: int = 9) -> None:
    """Flip one bit of the first chunk of an array."""
    if store.is_dir():
        flip(next(file for file in (store / array / "c").rglob("*") if file.is_file()), byte, 1)
        return
    with h5py.File(store) as opened:
        place = opened[array].id.get_chunk_info(0).byte_offset
    flip(store, place + byte, 1)


def random_flips(path: Path, count: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Flip single bits at random places (a file, a byte, a bit); yield whether each flip was
    reported, with part and array if it lies in the data of an array."""
    chance, files, chunks = random.Random(seed), files_of(path), chunks_of(path)
    for _ in range(count):
        file, bit = chance.choice(files), chance.randrange(8)
        byte = chance.randrange(file.stat().st_size)
        flip(file, byte, bit)
        found, named = problems(path), array_at(file.relative_to(path), byte, chunks)
        printed = any(line.startswith(named) for line in found)
        yield f"{file.relative_to(path.parent)} byte {byte} bit {bit} {named}: {found}", printed
        flip(file, byte, bit)


def chunks_of(path: Path) -> list[tuple[int, int, str]]:
    """Return the location of each array's chunks in an HDF5 file: first byte, last, name."""
    found: list[tuple[int, int, str]] = []

    def visit(name: str, item: Any) -> None:
        for number in range(item.id.get_num_chunks() if isinstance(item, h5py.Dataset) else 0):
            chunk = item.id.get_chunk_info(number)
            found.append((chunk.byte_offset, chunk.byte_offset + chunk.size, name))

    if path.is_file():
        with h5py.File(path) as file:
            file.visititems(visit)
    return found


def array_at(inside: Path, byte: int, chunks: list[tuple[int, int, str]]) -> str:
    """Return the beginning of verify's line on an array's data in a part; "" for other bytes."""
    name = next((name for first, end, name in chunks if first <= byte < end), "")
    parts = (name or str(inside).partition("/c/")[0] * ("/c/" in str(inside))).split("/")
    return f"part {parts[1]}: array {'/'.join(parts[2:])} " if parts[0] == "parts" else ""


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _cut(path: Path, keep: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * keep))


VALUES = "view0/hidden/{}/values"


ZARR: dict[str, Damage] = {
    "truncated data": lambda p: _cut(p / "parts/0/view0/logits/ids/c/0/0", 0.7),
    "emptied data": lambda p: _cut(p / "parts/1/token/id/c/0", 0),
    "truncated metadata": lambda p: _cut(p / "parts/0/token/id/zarr.json", 0.5),
    "missing file": lambda p: (p / "parts/1/text/utf8/c/0").unlink(),
    "missing array": lambda p: shutil.rmtree(p / "parts/0/view1/logits/rest"),
    "missing part": lambda p: shutil.rmtree(p / "parts/1"),
    "missing manifest": lambda p: shutil.rmtree(p / "manifest"),
    "missing calibration": lambda p: shutil.rmtree(p / "calibration"),
    "swapped parts": lambda p: _swap(p / "parts/0", p / "parts/1"),
    "swapped files of two parts": lambda p: _swap(
        p / "parts/0/token/id/c/0", p / "parts/1/token/id/c/0"
    ),
    "swapped arrays": lambda p: _swap(
        p / "parts/0" / VALUES.format("mean"), p / "parts/0" / VALUES.format("groups2.1")
    ),
    "swapped files of two arrays": lambda p: _swap(
        p / "parts/0/token/begin/c/0", p / "parts/0/token/end/c/0"
    ),
    "swapped views": lambda p: _swap(p / "parts/1/view0/hidden", p / "parts/1/view1/hidden"),
    "duplicated part": lambda p: shutil.copytree(p / "parts/0", p / "parts/9"),
    "part in place of another": lambda p: shutil.copytree(
        p / "parts/0", p / "parts/1", dirs_exist_ok=True
    ),
    "duplicated file": lambda p: shutil.copy(
        p / "parts/0/token/id/c/0", p / "parts/0/token/id/c/1"
    ),
    "extra file": lambda p: (p / "parts/0/notes.txt").write_text("hello"),
    "link to a folder": lambda p: (p / "parts/loop").symlink_to(p),
}


def _edit(change: Callable[[h5py.File], object]) -> Damage:
    """Change an HDF5 store with its library, and update the SHA-256 at its end."""

    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)
        append_digest(path)

    return damage


def _swap_names(file: h5py.File, one: str, other: str) -> None:
    file.move(one, "aside")
    file.move(other, one)
    file.move("aside", other)


def _replace(file: h5py.File, name: str, by: str) -> None:
    del file[name]
    file.copy(by, name)


HDF5: dict[str, Damage] = {
    "truncated file": lambda p: _cut(p, 0.9),
    "without its end": lambda p: _cut(p, 1 - 32 / p.stat().st_size),
    "longer file": lambda p: p.open("ab").write(b"more"),
    "altered value": _edit(lambda f: f["parts/0/token/id"].__setitem__(3, 7)),
    "missing array": _edit(lambda f: f.__delitem__("parts/0/view1/logits/rest")),
    "missing part": _edit(lambda f: f.__delitem__("parts/1")),
    "missing manifest": _edit(lambda f: f.__delitem__("manifest")),
    "missing calibration": _edit(lambda f: f.__delitem__("calibration")),
    "swapped parts": _edit(lambda f: _swap_names(f, "parts/0", "parts/1")),
    "swapped arrays": _edit(
        lambda f: _swap_names(
            f, "parts/0/" + VALUES.format("mean"), "parts/0/" + VALUES.format("groups2.1")
        )
    ),
    "swapped begin and end": _edit(
        lambda f: _swap_names(f, "parts/0/token/begin", "parts/0/token/end")
    ),
    "swapped views": _edit(
        lambda f: _swap_names(f, "parts/1/view0/hidden", "parts/1/view1/hidden")
    ),
    "duplicated part": _edit(lambda f: f.copy("parts/0", "parts/9")),
    "part in place of another": _edit(lambda f: _replace(f, "parts/1", "parts/0")),
    "extra array": _edit(lambda f: f["parts/0"].create_dataset("notes", data=[1])),
    "array that is a link": _edit(
        lambda f: (f.__delitem__("parts/0/token/end"),
                   f.__setitem__("parts/0/token/end", f["parts/0/token/begin"]))
    ),
}  # fmt: skip
DAMAGES = {"zarr": ZARR, "h5": HDF5}


def damaged(source: Path, folder: Path, ext: str) -> Iterator[tuple[str, list[str]]]:
    """Damage copies of a store in every way; yield each damage, and the report."""
    for name, damage in DAMAGES[ext].items():
        copy = folder / f"damaged.{ext}"
        damage(copied(source, copy))
        yield name, problems(copy)
        remove(copy)


def good_stores(folder: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    """Make sound stores of many kinds; yield the reported problems (there should be none)."""
    widths, chance = (1, 2, 31, 32, 33, 64, 100, 384), random.Random(count)
    kinds = list(
        product(
            FORMATS, ("exact", "default", "small"), ("topk", "ranked-topk", "sample", "head", None)
        )
    )
    for number in range(count):
        ext, codec, tier = kinds[number % len(kinds)]
        features: Features = dataclasses.replace(
            features_of(codec, tier, views=1 + number % 3),
            width=widths[number % len(widths)],
            hidden=chance.choice([("mean",), ("layer0", "groups2.0"), ()]),
            attention=chance.choice([("mean",), ()]),
        )
        path = folder / f"good.{ext}"
        files = {"tokenizer.json": TOKENIZER} if number % 5 else {}
        make_store(path, features, parts=1 + number % 4, sequences=1 + number % 9, files=files)
        yield f"{ext} {codec} {tier} {features.width} wide, {features.views} views", problems(path)
        remove(path)
