"""The files of a capture: listed by number, hashed, decompressed and loaded within bounds."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line

BLOCK = 1 << 20
MOST_BYTES = 1 << 34  # that one compressed sample may take
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def numbered(paths: Iterable[Path]) -> list[Path]:
    """Sort paths so that `data_10` comes after `data_9`."""

    def key(path: Path) -> list[tuple[int, str]]:
        found = re.findall(r"\d+|\D+", str(path))
        return [(int(part), "") if part.isdigit() else (-1, part) for part in found]

    return sorted(paths, key=key)


def stamps(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return size and time of each file, by which a change is seen."""
    return [(found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files)]


def identity(
    kind: str, source: Path, files: list[Path], progress: Progress = lambda items, unit: items
) -> dict[str, Any]:
    """Describe the files of a capture as JSON: two that are alike give the same samples."""
    digest, size = hashlib.sha256(), 0
    for path in progress(files, "file"):
        inner = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                inner.update(block)
                size += len(block)
        name = path.relative_to(source) if path.is_relative_to(source) else path.name
        digest.update(f"{name} {inner.hexdigest()}\n".encode())
    return {
        "kind": kind,
        "name": source.resolve().name,
        "files": len(files),
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


def unzstd(data: bytes, where: str) -> bytes:
    """Decompress a Zstandard frame. Raises UserError for what is none."""
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            return _bounded(stream.read(MOST_BYTES + 1), where)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: cannot be decompressed ({first_line(error)})") from None


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise UserError(f"{where}: decompresses to more than {MOST_BYTES:,} bytes; is not read")
    return data


def gunzip(path: Path) -> bytes:
    """Decompress a .gz file. Raises UserError for what is none."""
    try:
        with gzip.open(path, "rb") as file:
            return _bounded(file.read(MOST_BYTES + 1), str(path))
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be decompressed ({first_line(error)})") from None


def load_tensors(data: Path | bytes, where: str) -> dict[str, Any]:
    """Load what torch.save wrote of a dictionary, tensors and plain values alone.

    Raises UserError for anything that is pickled besides: nothing of it is run.
    """
    import torch

    source: Any = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # the library raises errors of any kind for a bad file
        told = "weights_only" in str(error) or "Unsupported" in str(error)
        raise UserError(
            f"{where}: holds pickled objects other than tensors, which could run code of a stranger"
            " and are not read; save tensors alone"
            if told
            else f"{where}: cannot be read as tensors ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"{where}: holds a {type(found).__name__}, expected a dictionary of tensors"
        )
    return found
