"""Shared parts of several trials: a teacher, a folder in memory, the content of a store."""

import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from teachonce.store import UserError, open_store
from tests.making.models import TOKENIZER_OF, random_model, trained_tokenizer


def save_teacher(folder: Path, kind: str = "bert", head: str = "mlm") -> Path:
    """Save a small random teacher and its tokenizer."""
    tokenizer = trained_tokenizer(TOKENIZER_OF[kind])
    for part in (random_model(kind, tokenizer, head), tokenizer):
        part.save_pretrained(folder)
    return folder


def content_of(path: str | Path) -> str:
    with closing(open_store(path)) as store:
        return store.manifest.content()


def is_finished(path: Path) -> bool:
    """Return whether a store can be opened."""
    try:
        open_store(path).close()
    except UserError:
        return False
    return True


def remove(*paths: Path) -> None:
    """Remove files, links and folders."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder in memory: stores here are small and many, and a disk would be slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def limit_memory(more: int) -> None:
    """Let this process use at most N bytes in addition to its present memory."""
    held = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.RLIM_INFINITY))
