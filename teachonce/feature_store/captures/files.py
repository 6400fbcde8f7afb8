"""The files of a capture: list, hash and decompress them in bounded memory."""

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
# Limits of a decompressed sample. A few KB may declare to be many GB (a decompression bomb).
MOST_BYTES = 1 << 34
SLACK_BYTES, MOST_TIMES = 1 << 26, 256  # 64 MiB and 256 times the compressed bytes
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def numbered(paths: Iterable[Path]) -> list[Path]:
    """Sort paths so that `data_10` comes after `data_9`."""

    def key(path: Path) -> list[tuple[int, str]]:
        parts = re.findall(r"\d+|\D+", str(path))
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(paths, key=key)


def file_versions(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return size and modification time of each file, to notice changes."""
    # Not their hashes, which would read the whole capture once more.
    return [(info.st_size, info.st_mtime_ns) for info in (path.stat() for path in files)]


def identity(
    kind: str, source: Path, files: list[Path], progress: Progress = lambda items, unit: items
) -> dict[str, Any]:
    """Describe the files of a capture as JSON, with a hash of their names and contents.

    Captures of one `kind` with equal descriptions have equal samples.
    """
    digest, size = hashlib.sha256(), 0
    for path in progress(files, "file"):
        with path.open("rb") as file:
            inner = hashlib.file_digest(file, "sha256")
            size += file.tell()
        # A capture that was moved stays the same: only paths inside its folder count.
        name = path.relative_to(source) if path.is_relative_to(source) else path.name
        # A name may have bytes that are not UTF-8, which Python reads as surrogates.
        digest.update(f"{name} {inner.hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return {
        "kind": kind,
        "name": source.resolve().name,
        "files": len(files),
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


def regular(paths: Iterable[Path]) -> list[Path]:
    """Return the paths, which must all be regular files.

    Raises UserError for a path that cannot be read, and for a pipe or a device, which would block.
    """
    files = list(paths)
    for path in files:
        try:
            kind = path.stat().st_mode  # follows links: caches of the hub consist of links
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason(error)}); copy it again") from None
        if not stat.S_ISREG(kind):
            raise UserError(f"{path}: is not a file (but a pipe, a device or a folder); remove it")
    return files


def unzstd(data: bytes, where: str) -> bytes:
    """Decompress Zstandard frames. Raises UserError for other data, and for a truncated frame."""
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            return _bounded(stream.read, len(data), where)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{where}: cannot be decompressed ({first_line(error)}); copy it again"
        ) from None


def gunzip(path: Path) -> bytes:
    """Decompress a .gz file. Raises UserError for other data, and for a truncated file."""
    regular([path])
    try:
        with gzip.open(path, "rb") as file:
            return _bounded(file.read, path.stat().st_size, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be decompressed ({first_line(error)}); copy it again"
        ) from None


def _bounded(read: Callable[[int], bytes], stored: int, where: str) -> bytes:
    """Read a stream to its end, block by block, because a size in its header may be false."""
    most = min(MOST_BYTES, SLACK_BYTES + MOST_TIMES * stored)
    blocks, size = list[bytes](), 0
    while block := read(BLOCK):
        blocks.append(block)
        size += len(block)
        if size > most:
            raise UserError(
                f"{where}: {stored:,} bytes, which decompresses to more than {most:,} bytes; it is"
                " not read: capture this sample again"
            )
    return b"".join(blocks)
