"""A writer in its own process that does what it is told (python -m tests.support.leased STORE).

Reads words from stdin, a line each: a number publishes that part, `seal` seals. Answers `done` or
the error. `--elsewhere` has it believe that it is on another machine, `--lockless` that the file
system has no locks, `--beat S` sets the seconds between heartbeats.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from teachonce.store import UserError
from teachonce.support import files, lease
from tests.store.making import begin, make_part, put_part
from tests.store.write.test_writing import SMALL

HOLD = """
import sys
from pathlib import Path
from teachonce.support.lease import Lease
lease = Lease(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
ROOT = Path(__file__).parents[2]


def pretend(words: list[str]) -> None:
    """Apply the options to this process."""
    if "--elsewhere" in words:
        real = lease._process
        lease._process = lambda pid: {**real(pid), "host": "far", "boot": "far"}
    if "--lockless" in words:
        files.lock = lambda file, wait: None
    if "--beat" in words:
        lease.BEAT = float(words[words.index("--beat") + 1])


def main(words: list[str]) -> None:
    pretend(words)
    try:
        writer = begin(Path(words[0]), SMALL)
        print("done", flush=True)
        for line in sys.stdin:
            if line.strip() == "seal":
                writer.seal()
            else:
                put_part(writer, int(line), make_part(SMALL, int(line)))
            print("done", flush=True)
    except UserError as error:
        print(error, flush=True)


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the lease of a path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout and process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class Writer:
    """Such a process, seen from outside."""

    def __init__(self, store: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.leased", str(store), *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, word: str | int) -> str:
        assert self.process.stdin
        print(word, file=self.process.stdin, flush=True)
        return self.answer()


if __name__ == "__main__":
    main(sys.argv[1:])
