"""Opens a file as bytes, and decompresses .gz, .bz2, .xz and .zst while it is read.

Memory is bounded: by a block, by XZ_MEMORY for xz, and by the default window of 128 MiB for zstd. A
file that decompresses to more than RATIO times its size is refused.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from teachonce.support.errors import first_line
from teachonce.teacher_dump.corpus.errors import CorpusError

BLOCK = 1 << 20  # bytes that are read at once
XZ_MEMORY = 1 << 28  # bytes that an xz decoder may take; the highest preset needs 65 MiB
UNPACKED_FREELY = 1 << 27  # bytes that any file may decompress to
# Decompressed bytes per compressed byte: text has 3 to 20, a decompression bomb 1,000 and more.
RATIO = 500
Seen = Callable[[bytes], object]
"""A function that is called with all bytes of a file in order, as it is read."""


def ignore(raw: bytes) -> None:
    """Discard the bytes, for callers that hash nothing."""


class _Xz:
    """Unpacks concatenated xz streams."""

    # lzma.LZMAFile cannot bound its memory.

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def read(self, size: int) -> bytes:
        while True:
            if self._decoder.eof:
                raw = self._decoder.unused_data.lstrip(b"\0") or self._packed.read(BLOCK)
                if not (raw := raw.lstrip(b"\0")):  # streams are padded with zeros
                    return b""
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            else:
                raw = self._packed.read(BLOCK) if self._decoder.needs_input else b""
                if not raw and self._decoder.needs_input:
                    raise EOFError("it ends before its end marker")
            if data := self._decoder.decompress(raw, size):
                return data


def _zstd(packed: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(packed, "zstd")


PACKED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    ".gz": ("gzip", lambda packed: gzip.GzipFile(fileobj=packed)),
    ".bz2": ("bzip2", bz2.BZ2File),
    ".xz": ("xz", _Xz),
    ".zst": ("zstd", _zstd),
}
"""For each suffix the command that decompresses such files, and the function that opens them."""


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed, by its suffix."""
    return path.suffix.lower() in PACKED


def suffix_of(path: Path) -> str:
    """Return the suffix that names the format, in lower case: `.csv` for `a.csv.gz`."""
    return Path(path.stem).suffix.lower() if is_packed(path) else path.suffix.lower()


def stem_of(path: Path) -> str:
    """Return the name without the suffixes of format and compression: `a` for `a.csv.gz`."""
    return Path(path.stem).stem if is_packed(path) else path.stem


class _Unpacked(io.RawIOBase):
    """Reads the decompressed bytes of a file. Raises CorpusError if it is damaged or cut off."""

    def __init__(self, path: Path, packed: BinaryIO) -> None:
        self._path, self._packed, self._size = path, packed, 0
        self._kind, opened = PACKED[path.suffix.lower()]
        self._stream = opened(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        filled = 0
        # Filled, as `peek` in `text_files` looks at the head of a file with one call.
        while filled < len(buffer):
            try:
                data = self._stream.read(len(buffer) - filled)
            # A damaged file raises OSError (gzip, bz2, Arrow's zstd), zlib.error or LZMAError; a
            # truncated one mostly EOFError.
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                raise CorpusError(
                    f"{self._path}: cannot be decompressed by {self._kind} ({first_line(error)});"
                    " it is damaged, truncated or has the wrong suffix: download it again"
                ) from None
            if not data:
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        self._size += filled
        # Of the bytes read so far: a decompression bomb is refused long before its end.
        if self._size > UNPACKED_FREELY and self._size > RATIO * self._packed.tell():
            raise CorpusError(
                f"{self._path}: decompresses to more than {RATIO} times its size, which no text"
                f" does; look at it with `{self._kind} -dc`, and give the decompressed file if it"
                " is right"
            )
        return filled


@contextmanager
def open_bytes(path: Path, seen: Seen = ignore) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed. For a compressed file `seen` receives the compressed bytes."""
    if not is_packed(path):
        with path.open("rb") as file:
            yield file
        return
    with seen_whole(path, seen), path.open("rb") as packed:
        yield io.BufferedReader(_Unpacked(path, packed), BLOCK)


@contextmanager
def seen_whole(path: Path, seen: Seen) -> Iterator[None]:
    """Pass all bytes of a file to `seen`, in order, before the `with` block reads the file.

    If the file has changed when the block ends, `seen` receives an extra block, so that the hash
    differs.
    """
    if seen is ignore:
        yield
        return
    before = hashlib.sha256()
    with path.open("rb") as file:
        while raw := file.read(BLOCK):
            before.update(raw)
            seen(raw)
    try:
        yield
    finally:
        try:
            with path.open("rb") as file:
                after = hashlib.file_digest(file, "sha256").digest()
        except OSError:
            after = b""
        if after != before.digest():
            # So that a hash made of the bytes matches neither version of the file.
            seen(b"changed")
