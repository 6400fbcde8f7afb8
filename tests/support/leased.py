"""A writer in its own process that executes commands.

It receives words: a number publishes the part of that number, `seal` seals the store. It answers
`done` or the error. At its start, `--elsewhere` makes it appear to run on another machine,
`--lockless` makes the file system appear to have no locks, and `--beat S` sets the seconds between
heartbeats.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from harness.processes import finish, fork
from teachonce.store import UserError
from teachonce.support import files, lease
from tests.making.stores import SMALL, begin, make_part, put_part


def pretend(words: tuple[str, ...]) -> None:
    """Apply the options to this process."""
    if "--elsewhere" in words:
        real = lease._process
        lease._process = lambda pid: {**real(pid), "host": "far", "boot": "far"}
    if "--lockless" in words:
        files.lock = lambda file, wait: None
    if "--beat" in words:
        lease.BEAT = float(words[words.index("--beat") + 1])


def write(connection: Connection, store: Path, words: tuple[str, ...]) -> None:
    pretend(words)
    try:
        writer = begin(store, SMALL)
        while True:
            connection.send_bytes(b"done")
            word = connection.recv_bytes()
            if word == b"seal":
                writer.seal()
            else:
                put_part(writer, int(word), make_part(SMALL, int(word)))
    except UserError as error:
        connection.send_bytes(str(error).encode())
    except EOFError:
        return


def hold(connection: Connection, path: Path) -> None:
    with closing(lease.Lease(path)):
        connection.send_bytes(b"held")
        connection.poll(None)


class ForkedProcess:
    """A process that calls a function of a module with a connection; it is killed at the end."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.connection, other = Pipe()
        self.process = fork(work, other, *arguments)
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        finish(self.process)
        self.connection.close()

    def answer(self) -> str:
        return self.connection.recv_bytes().decode()

    def say(self, word: str | int) -> None:
        self.connection.send_bytes(str(word).encode())

    def request(self, word: str | int) -> str:
        self.say(word)
        return self.answer()


class Writer(ForkedProcess):
    """A process that writes a store."""

    def __init__(self, store: Path, *words: str) -> None:
        super().__init__(write, store, words)


@contextmanager
def held(path: Path) -> Iterator[ForkServerProcess]:
    """Start a process that holds the lease of a path."""
    with ForkedProcess(hold, path) as printed:
        assert printed.answer() == "held"
        yield printed.process
