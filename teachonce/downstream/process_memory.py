"""Reads what Linux says of the memory of this process; light, for processes that measure."""

from __future__ import annotations

import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def status_bytes(name: str) -> int:
    """Return `VmRSS`, `VmHWM` (its peak) and so on in bytes. Raises OSError where there is none."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", STATUS.read_text(), re.M)
    if not found:
        raise OSError(f"{STATUS} has no {name}")
    return 1024 * int(found[1])
