"""`python -m benchmarks`: the measurements that take minutes; the others name their own command."""

from __future__ import annotations

from benchmarks import codecs

if __name__ == "__main__":
    codecs.main()
