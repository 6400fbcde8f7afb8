"""What two stores have to have in common."""

from __future__ import annotations

from pathlib import Path

from teachonce.store import open_store
from teachonce.store.tools.verify import verify


def content_of_store(out: Path) -> object:
    """Return the manifest, with the SHA-256 of every array, and all sequences. Raises RuntimeError
    for an unsound store."""
    if (problems := verify(out).problems) or sorted(p.name for p in out.parent.iterdir()) != sorted(
        ["log", out.name]
    ):
        raise RuntimeError(f"{out}: {problems or list(out.parent.iterdir())}")
    store = open_store(out)
    sequences = [(record.document, record.text) for record in store]
    store.close()
    return store.manifest, sequences
