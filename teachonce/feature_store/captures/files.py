"""The files of a capture: listed, hashed, unpacked within bounds."""

from __future__ import annotations

import gzip
import hashlib
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line
from teachonce.support.files import reason

BLOCK = 1 << 20
MOST_BYTES = 1 << 34  # that one compressed sample may take
SLACK_BYTES, MOST_TIMES = 1 << 26, 256  # and that many times its own bytes
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


def regular(paths: Iterable[Path]) -> list[Path]:
    """Return paths of files. Raises UserError for what would be waited for (a pipe, a device), or
    cannot be read."""
    found = list(paths)
    for path in found:
        try:
            kind = path.stat().st_mode  # of what a link leads to: caches of the hub are links
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason(error)}); copy it again") from None
        if not stat.S_ISREG(kind):
            raise UserError(f"{path}: is no file (a pipe, a device or a folder); take it out")
    return found


def unzstd(data: bytes, where: str) -> bytes:
    """Decompress Zstandard frames. Raises UserError for what is none, or is cut off."""
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            return _bounded(stream.read, len(data), where)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: cannot be decompressed ({first_line(error)})") from None


def gunzip(path: Path) -> bytes:
    """Decompress a .gz file. Raises UserError for what is none, or is cut off."""
    regular([path])
    try:
        with gzip.open(path, "rb") as file:
            return _bounded(file.read, path.stat().st_size, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be decompressed ({first_line(error)})") from None


def _bounded(read: Callable[[int], bytes], stored: int, where: str) -> bytes:
    """Read a stream to its end, some bytes at a time: memory grows with what comes."""
    most = min(MOST_BYTES, SLACK_BYTES + MOST_TIMES * stored)
    blocks, size = list[bytes](), 0
    while block := read(BLOCK):
        blocks.append(block)
        size += len(block)
        if size > most:
            raise UserError(
                f"{where}: decompresses to more than {most:,} bytes, of {stored:,}; is not read"
            )
    return b"".join(blocks)
