"""`python -m benchmarks`: the measurements that take minutes, one after another.

Those that take hours, or a store of your own, name their own command.
"""

from __future__ import annotations

import subprocess
import sys

SHORT = ("codecs", "teacher_gone", "latency")


def main() -> None:
    """Each in a process of its own, so that none finds the memory of another in its figures."""
    for name in SHORT:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
