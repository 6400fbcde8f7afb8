"""Decode some rows of a Blosc frame without decoding all of it."""

from __future__ import annotations

import struct
from operator import lt
from typing import Any

import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Fields: format version, codec version, flags, bytes of an element; then three sizes in bytes: the
# decoded data, one decoded block, the frame.
BLOSC_HEADER = struct.Struct("<BBBBIII")
BLOSC_FORMAT = 2
BLOSC_COPIED = 2  # flag: the data follow the header uncompressed


class Damage(Exception):
    """Raised for damaged bytes. The message describes the damage; the caller adds the path."""


def decoded_size(frame: Bytes) -> int:
    """Return the decoded size that a Blosc frame declares; -1 if the frame is too short."""
    return int(BLOSC_HEADER.unpack_from(frame.data)[4]) if len(frame) >= BLOSC_HEADER.size else -1


def decode(frame: Bytes, subject: str, size: int, low: int, high: int, out: Bytes) -> None:
    """Decode a Blosc frame, and write bytes low..high of its `size` decoded bytes to `out`. Raises
    Damage, whose message names the frame as `subject`."""
    # Blosc trusts the sizes in the header, so a forged one would make it read or write elsewhere.
    if len(frame) < BLOSC_HEADER.size:
        raise Damage(f"{subject} has {len(frame)} bytes, too few for Blosc")
    *_, flags, _, decoded, block, encoded = BLOSC_HEADER.unpack_from(frame.data)
    if (decoded, encoded) != (size, len(frame)) or not 0 < block <= size:
        raise Damage(f"{subject} decodes to {decoded} bytes, expected {size}")
    # A copied frame has no table of block starts; `_blocks` would read its data as such a table.
    if flags & BLOSC_COPIED and len(frame) == BLOSC_HEADER.size + size:
        out[:] = frame[BLOSC_HEADER.size :][low:high]
        return
    cut, begin, end = _blocks(frame, size, block, low, high)
    try:
        if (begin, end) == (low, high):
            blosc.decompress(cut, out)
        else:
            scratch = np.empty(end - begin, np.uint8)
            blosc.decompress(cut, scratch)
            out[:] = scratch[low - begin : high - begin]
    except (RuntimeError, ValueError) as error:
        raise Damage(f"{subject}: {error}") from error


def _blocks(frame: Bytes, size: int, block: int, low: int, high: int) -> tuple[Any, int, int]:
    """Cut a frame down to the blocks that contain decoded bytes low..high. Return the shorter
    frame, and the begin and end of its decoded bytes in those of the whole frame."""
    # A frame of format 2 is a header, the int32 start of each block, and the blocks. So a header
    # with adapted starts and a few of the blocks is a valid frame, too.
    version, library, flags, typesize, *_ = BLOSC_HEADER.unpack_from(frame.data)
    count = -(-size // block)
    table = BLOSC_HEADER.size + 4 * count
    first, last = low // block, -(-high // block)
    if last == count and size % block:
        first = min(first, max(0, count - 2))  # no frame is smaller than its block size
    if (first, last) == (0, count) or version != BLOSC_FORMAT or table >= len(frame):
        return frame, 0, size
    edges = [*frame[BLOSC_HEADER.size : table].view("<i4").tolist(), len(frame)]
    if edges[0] < table or not all(map(lt, edges, edges[1:])):  # blocks may be in any order
        return frame, 0, size
    begin, end = first * block, min(last * block, size)
    shift = BLOSC_HEADER.size + 4 * (last - first) - edges[first]
    starts = [edge + shift for edge in edges[first:last]]
    header = BLOSC_HEADER.pack(
        version, library, flags, typesize, end - begin, block, edges[last] + shift
    )
    data = frame[edges[first] : edges[last]].data
    return b"".join([header, struct.pack(f"<{len(starts)}i", *starts), data]), begin, end
