"""Write entries into a cache from a process of its own (python -m tests.store.containers.caching
DIR BOUND SEED), until it is killed."""

import random
import sys
from itertools import count
from pathlib import Path

import numpy as np

from teachonce.store.containers.disk_cache import UNIT, DiskCache, FetchedBytes

STORE, LARGEST = "store", 50 * UNIT


def piece_of(name: int) -> FetchedBytes:
    """Return the piece of a name; the bytes of each name are unique."""
    chance = np.random.default_rng(name)
    size = int(chance.integers(1, LARGEST))
    return FetchedBytes(chance.integers(0, 256, size, np.uint8), size + name, set())


def put(cache: DiskCache, name: int) -> None:
    piece = piece_of(name)
    cache.put(STORE, str(name), 0, len(piece.data), piece)


def get(cache: DiskCache, name: int) -> FetchedBytes | None:
    return cache.get(STORE, str(name), 0, len(piece_of(name).data))


def main(folder: str, bound: str, seed: str) -> None:
    chance, cache = random.Random(int(seed)), DiskCache(Path(folder), int(bound))
    print("started", flush=True)
    for _ in count():
        put(cache, chance.randrange(40))
        get(cache, chance.randrange(40))


if __name__ == "__main__":
    main(*sys.argv[1:])
