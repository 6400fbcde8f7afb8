"""Reads UTF-8 files, plain or compressed, as bytes or by lines.

Memory is bounded: by a block, by XZ_MEMORY for .xz, and by the default window of 128 MiB for .zst.
A file that decompresses to more than RATIO times its size is refused.

Lines end with a line feed; a carriage return before it and a byte order mark at the start are
dropped. In a file without line feeds, carriage returns end lines, as in files of old Macs. A
carriage return inside a line is refused, except in .csv and .json: it may have been meant as the
end of a line.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, cast

from teachonce.support.errors import UserError, first_line, suggest


class CorpusError(UserError):
    """Raised for a corpus that cannot be read."""


def no_column(
    name: str, columns: Iterable[str], where: object, remedy: str, role: str = ""
) -> CorpusError:
    """Return the error for a row or table that lacks a column; `role` describes the column."""
    names = list(columns)
    listed = ", ".join(map(repr, names)) or "none"
    if any(" " in column for column in names):  # a name rarely has spaces, a text nearly always
        remedy += "; or, if these are a text and its label, add a header in front of them"
    return CorpusError(
        f"{where}: no column {name!r}{role}; {suggest(name, names)}its columns are {listed};"
        f" {remedy}"
    )


BLOCK = 1 << 20  # bytes that are read at once
XZ_MEMORY = 1 << 28  # bytes that an xz decoder may take; the highest preset needs 65 MiB
UNPACKED_FREELY = 1 << 27  # bytes that any file may decompress to
# Decompressed bytes per compressed byte: text has 3 to 20, a decompression bomb 1,000 and more.
RATIO = 500
Seen = Callable[[bytes], object]
"""A function that is called with all bytes of a file in order, as it is read."""


def ignore_bytes(raw: bytes) -> None:
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
        # The whole buffer is filled, because `_head` calls `peek` only once.
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
        # Compares the bytes read so far: a decompression bomb is refused long before its end.
        if self._size > UNPACKED_FREELY and self._size > RATIO * self._packed.tell():
            raise CorpusError(
                f"{self._path}: decompresses to more than {RATIO} times its size, which no text"
                f" does; look at it with `{self._kind} -dc`, and give the decompressed file if it"
                " is right"
            )
        return filled


@contextmanager
def open_bytes(path: Path, seen: Seen = ignore_bytes) -> Iterator[io.BufferedReader]:
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
    if seen is ignore_bytes:
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


# Bytes of a line, or of a record in .csv. A longer line is refused before it is in memory.
MAX_LINE = 10_000_000
CUT_OFF = 3  # at most this many bytes remain of a UTF-8 character that is cut off
# Encodings by byte order mark; UTF-32 first, as its marks begin like UTF-16's.
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32"}
MARKS |= {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
LATIN = (
    ("LATIN1", "Latin-1"),
    ("ISO-8859-2", "ISO-8859-2 (Central Europe)"),
    ("CP1252", "cp1252 (Windows, Western Europe)"),
    ("CP1250", "cp1250 (Windows, Central Europe)"),
)
"""Latin encodings; the first ones have no characters at 0x80 to 0x9f, and are preferred if a text
fits several."""
SHOWN = 20  # bytes before and after the first one that is not UTF-8
INNER_RETURN = re.compile(rb"\r(?=[^\r\n])")
FREE = (".csv", ".json")  # a carriage return may be inside of quotes, or between brackets


STDIN = Path("stdin")
"""Standard input: `read_lines` compares by identity, so a file named stdin is read as a file."""


def read_lines(path: Path, seen: Seen = ignore_bytes, longest: int | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, or of STDIN, without their ends.

    `longest` is the maximum number of bytes of a line, and so of the memory for it; by default
    MAX_LINE. Raises CorpusError for a longer line, for a carriage return inside a line, and if the
    file is not UTF-8 text; raises OSError if the file cannot be opened or read.
    """
    longest = longest or MAX_LINE
    position = characters = 0
    with open_bytes(path, seen) if path is not STDIN else nullcontext(_standard_input()) as file:
        for number, raw in enumerate(_raw_lines(file, path, longest), 1):
            if not is_packed(path):
                seen(raw)
            if number == 1 and (
                encodings := [name for mark, name in MARKS.items() if raw.startswith(mark)]
            ):
                raise CorpusError(
                    f"{path}: looks like {encodings[0]}, expected UTF-8; convert it:"
                    f" {_iconv(encodings[0], path)}"
                )
            if (nul := raw.find(b"\0")) >= 0:
                raise CorpusError(
                    f"{path}, line {number}: a NUL byte at byte {position + nul}: "
                    f"this is a binary file; give UTF-8 text"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                # A line cut at `longest` may end inside a character: below it is refused as too
                # long.
                if len(raw) <= longest or error.reason != "unexpected end of data":
                    extra = position - characters
                    sample = raw + file.read(BLOCK)
                    raise _not_utf8(path, number, position, raw, error, extra, sample) from None
            if len(raw) > longest:
                raise CorpusError(
                    f"{path}, line {number}: longer than {longest:,} bytes; "
                    f"put one document on a line"
                )
            if b"\r" in raw and suffix_of(path) not in FREE and INNER_RETURN.search(raw):
                raise inner_return(path, number)
            position += len(raw)
            characters += len(line)
            yield line.removesuffix("\n").removesuffix("\r")


def _standard_input() -> io.BufferedReader:
    # Not by its path, /dev/stdin, which cannot be opened if it is a socket or another user's.
    # Python has no sys.stdin if the shell closed it (`<&-`): there is no text then.
    return cast(io.BufferedReader, sys.stdin.buffer if sys.stdin else io.BytesIO())


def _raw_lines(file: io.BufferedReader, path: Path, longest: int) -> Iterator[bytes]:
    """Yield lines with their ends; the caller refuses a line that is longer than `longest`."""
    head = _head(file)
    if b"\n" not in head and INNER_RETURN.search(head):
        yield from _returned_lines(file, path, longest)
        return
    while raw := file.readline(longest + 1):
        yield raw


def _head(file: io.BufferedReader) -> bytes:
    """Return the first bytes, at most BLOCK, without moving the position in the file."""
    # A decompressed stream cannot seek back. Its buffer has BLOCK bytes, which `peek` returns.
    if not file.seekable():
        return file.peek(BLOCK)
    start = file.tell()  # a shell may have read the first lines of STDIN
    head = file.read(BLOCK)
    file.seek(start)
    return head


def _returned_lines(file: io.BufferedReader, path: Path, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file without line feeds, which end with carriage returns."""
    rest, number = b"", 1
    while block := file.read(BLOCK):
        if b"\n" in block:
            raise inner_return(path, number)
        *lines, rest = (rest + block).split(b"\r")
        number += len(lines)
        yield from (line + b"\r" for line in lines)
        # The caller refuses it as too long; reading on would fill the memory.
        if len(rest) > longest:
            break
    if rest:
        yield rest


def inner_return(path: Path, number: int) -> CorpusError:
    """Return the error for a line with a carriage return, with a command that converts the file."""
    command = conversion(path, r"sed 's/\r$//; s/\r/\n/g'", "lines")
    return CorpusError(
        f"{path}, line {number}: a carriage return inside the line, where others end with a line"
        f" feed; write one kind of line end: {command}"
    )


def conversion(path: Path, program: str, name: str) -> str:
    """Return a shell command that decompresses a file, passes it through a program, and writes
    STEM.`name`.SUFFIX. For STDIN return the advice to pipe the text through the program first."""
    if path is STDIN:
        return f"pipe it through `{program}` first"
    unpack = f"{PACKED[path.suffix.lower()][0]} -dc" if is_packed(path) else "cat"
    output = f"{stem_of(path)}.{name}{suffix_of(path)}"
    return f"{unpack} {quote(str(path))} | {program} > {quote(output)}"


def _not_utf8(
    path: Path,
    number: int,
    position: int,
    raw: bytes,
    error: UnicodeDecodeError,
    extra: int,
    sample: bytes,
) -> CorpusError:
    """Return the error for a line that is not UTF-8, with a command that converts the file.

    extra: the number of bytes in earlier lines, minus the number of characters.
    sample: the line and the next BLOCK bytes.
    """
    # The decoder counts from the first byte after a byte order mark.
    start = error.start + len(raw) - len(error.object)
    where = f"{path}, line {number}: not UTF-8 at byte {position + start} (0x{raw[start]:02x})"
    if error.reason == "unexpected end of data" and not raw.endswith((b"\n", b"\r")):
        return CorpusError(
            f"{where}: the text ends inside a character, so it was truncated; provide the complete"
            " text"
        )
    label = _guess_encoding(raw)[1]
    line = raw.decode("utf-8", "ignore")
    valid = len(line.encode())
    # A line of another encoding has more broken bytes than the 3 of a character that was cut off,
    # and few characters of several bytes.
    if extra and len(raw) - valid > max(CUT_OFF, valid - len(line)):
        return CorpusError(
            f"{where}: earlier lines are UTF-8, and this one looks like {label}: the file mixes"
            " encodings; convert its parts to UTF-8 before they are joined"
        )
    # Text of another encoding has few bytes that are valid as UTF-8, and broken ones on each line.
    text = sample.decode("utf-8", "ignore")
    valid = len(text.encode())
    if extra + valid - len(text) > len(sample) - valid:
        return CorpusError(
            f"{where}: a broken character in UTF-8 text, cut off or of another encoding such as"
            f" {label}; correct the line, or delete all broken characters:"
            f" {_iconv('UTF-8', path, '-c ')}"
        )
    encoding, label = _guess_encoding(sample)
    # The guess may be wrong, and iconv accepts almost any bytes: only the user sees that.
    shown = raw[max(0, start - SHOWN) : start + SHOWN].decode(encoding, "replace").strip()
    return CorpusError(
        f"{where}: looks like {label}, which makes it {shown!r}; convert it, with another encoding"
        f" than {encoding} if that is wrong: {_iconv(encoding, path)}"
    )


def _guess_encoding(raw: bytes) -> tuple[str, str]:
    """Guess the encoding: its name for iconv and Python, and its name for a message."""
    # Whole words of bytes above 0x7f are Cyrillic; single such bytes among ASCII are Latin.
    high = sum(byte >= 0xC0 for byte in raw)
    latin = sum(chr(byte).isalpha() for byte in raw if byte < 0x80)
    if high <= latin:
        return min(LATIN, key=lambda names: _unlikely(raw, names[0]))
    # Lower-case letters, the majority in any text, are above 0xe0 in cp1251 and below in KOI8-R.
    if sum(byte >= 0xE0 for byte in raw) * 2 >= high:
        return "CP1251", "cp1251 (Windows Cyrillic)"
    return "KOI8-R", "KOI8-R (Cyrillic)"


def _unlikely(raw: bytes, encoding: str) -> int:
    """Count what a text rarely has if its encoding is this Latin one: control characters, bytes
    without a character, symbols between letters, and in Western Europe many š and ž."""
    text = raw.decode(encoding, "replace")
    triples = zip(" " + text, text, text[1:] + " ", strict=False)
    count = sum(
        unicodedata.category(one) in ("Cc", "So")
        or (not one.isalpha() and before.isalpha() and after.isalpha() and one not in "’\xad")
        for before, one, after in triples
        if one >= "\x80"
    )
    if encoding == "CP1252":
        # They are 8 % of the bytes above 0x7f in Czech and Slovak; French has them in names only.
        high = sum(byte >= 0x80 for byte in raw)
        count += max(0, sum(one in "ŠšŽž" for one in text) - high // 20)
    return count


def _iconv(encoding: str, path: Path, option: str = "") -> str:
    """Return the command that writes a file of another encoding, or a broken one, as UTF-8."""
    return conversion(path, f"iconv {option}-f {encoding} -t UTF-8", "utf8")
