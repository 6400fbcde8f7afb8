"""Lines of a UTF-8 file, streamed, and one clear line for what is not one.

Lines end with a line feed; a carriage return before it and a byte order mark at the start are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from support.errors import UserError

MAX_LINE = 10_000_000
"""Bytes of one line (of one record in .csv); a longer one is refused before it is in memory."""
Seen = Callable[[bytes], object]
"""Told every byte of a file as it is read, by the readers that read it once and in order."""


class CorpusError(UserError):
    """A corpus that cannot be read."""


def ignore(raw: bytes) -> None:
    """What is told of bytes that nobody wants to know."""


def read_lines(path: Path, seen: Seen = ignore, longest: int | None = None) -> Iterator[str]:
    """Lines of a UTF-8 file without their ends; never more than `longest` bytes (MAX_LINE) at once.

    Raises CorpusError on what is not such a file, and OSError.
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
    """(name for iconv, for a person): whole words above 0x7f are Cyrillic, single bytes not."""
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
