"""Streams the lines of a UTF-8 file, and refuses any other file in one clear line.

Lines end with a line feed; a carriage return before it and a byte order mark at the start are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from teachonce.support.errors import UserError

MAX_LINE = 10_000_000
"""Bytes of one line (of one record in .csv); a longer one is refused before it is in memory."""
Seen = Callable[[bytes], object]
"""A function that is called with all bytes of a file in order, line by line, as it is read."""


class CorpusError(UserError):
    """A corpus that cannot be read."""


def ignore(raw: bytes) -> None:
    """Do nothing with the bytes that are read."""


def read_lines(path: Path, seen: Seen = ignore, longest: int | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends.

    `longest` is the number of bytes that a line may have, MAX_LINE by default; no more are in
    memory at once. Raises CorpusError for what is not such a file, and OSError.
    """
    longest = longest or MAX_LINE
    position = 0
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            raw = file.readline(longest + 1)
            if not raw:
                return
            seen(raw)
            if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise CorpusError(
                    f"{path}: looks like UTF-16, expected UTF-8; {_iconv('UTF-16', path)}"
                )
            if (nul := raw.find(b"\0")) >= 0:
                raise CorpusError(
                    f"{path}, line {number}: a NUL byte at byte {position + nul}: "
                    f"this is a binary file; give UTF-8 text"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                if len(raw) <= longest or error.reason != "unexpected end of data":
                    raise _not_utf8(path, number, position, raw, error) from None
            if len(raw) > longest:
                raise CorpusError(
                    f"{path}, line {number}: longer than {longest:,} bytes; "
                    f"put one document on a line"
                )
            position += len(raw)
            yield line.removesuffix("\n").removesuffix("\r")


def _not_utf8(
    path: Path, number: int, position: int, raw: bytes, error: UnicodeDecodeError
) -> CorpusError:
    # the decoder counts from behind a byte order mark
    start = error.start + len(raw) - len(error.object)
    where = f"{path}, line {number}: not UTF-8 at byte {position + start} (0x{raw[start]:02x})"
    if error.reason == "unexpected end of data" and not raw.endswith(b"\n"):
        return CorpusError(
            f"{where}: the file ends inside a character; it was cut off, fetch it again"
        )
    encoding, label = _guess_encoding(raw)
    return CorpusError(f"{where}: looks like {label}; {_iconv(encoding, path)}")


def _guess_encoding(raw: bytes) -> tuple[str, str]:
    """Name the encoding for iconv and for a person.

    Whole words of bytes above 0x7f are Cyrillic, single bytes among ASCII are Latin.
    """
    high = sum(byte >= 0xC0 for byte in raw)
    latin = sum(chr(byte).isalpha() for byte in raw if byte < 0x80)
    if high <= latin:
        return "LATIN1", "Latin-1"
    # small letters, the most of any text, are above 0xe0 in cp1251 and below it in KOI8-R
    if sum(byte >= 0xE0 for byte in raw) * 2 >= high:
        return "CP1251", "cp1251 (Windows Cyrillic)"
    return "KOI8-R", "KOI8-R (Cyrillic)"


def _iconv(encoding: str, path: Path) -> str:
    return f"convert it: iconv -f {encoding} -t UTF-8 '{path}' > '{path.stem}.utf8{path.suffix}'"
