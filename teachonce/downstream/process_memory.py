"""Reads memory figures of this process from /proc. It imports nothing that would increase them."""

from __future__ import annotations

import re
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


def status_bytes(name: str) -> int:
    """Return a field of /proc/self/status in bytes, such as `VmRSS` or its peak `VmHWM`. Raises
    OSError if /proc or the field is missing."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", STATUS.read_text(), re.M)
    if not match:
        raise OSError(f"{STATUS} has no {name}")
    return 1024 * int(match[1])


def reset_peak() -> None:
    """Reset the peak `VmHWM` to the current `VmRSS`. Raises OSError if /proc is missing."""
    RESET.write_text("5")  # 5 resets VmHWM, see proc(5)
