"""The formats of one corpus, read in turn: warm, from the disk, and by two processes at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import publish, table
from benchmarks.reading.store_readers import Peer, Stream, peers
from benchmarks.reading.workload import Arrays, Corpus
from harness.synthetic import features_of, make_store
from teachonce.store import StoreError, open_store
from teachonce.store.tools.copy import convert

SECONDS = 3.0  # of an epoch of a slow reader
EPOCHS = 3  # that are timed in a process
WARM = (
    "warm",
    "disk B/token",
    "tokens/s",
    "best round, tokens/s",
    "tokens per CPU second",
    "ours (Zarr) is faster by, times",
    "the same per CPU second, times",
)
COLD = ("ours, Zarr", "ours, HDF5", ".npy memory map, fused records")
PACKAGES = ("numcodecs", "tensorstore", "pyarrow", "datasets", "litdata", "mosaicml-streaming")


def consume(batches: Iterator[Arrays]) -> tuple[float, float]:
    """Return tokens per second, and per CPU second of this process; stop a slow reader early."""
    begin, work, tokens = time.perf_counter(), time.process_time(), 0
    for arrays in batches:
        tokens += len(arrays["token/id"])
        if time.perf_counter() - begin > SECONDS:
            break
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - work)


def sums(batches: Iterator[Arrays]) -> dict[str, int]:
    """Sum the bits of every array over an epoch. The order of batches does not matter."""
    totals: dict[str, int] = {}
    for arrays in batches:
        for name, values in arrays.items():
            bits = values.view(f"u{values.dtype.itemsize}")
            totals[name] = totals.get(name, 0) + int(bits.sum(dtype=np.uint64))
    return totals


def files(path: Path) -> list[Path]:
    """Return all files of a format."""
    return sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]


def evict(path: Path) -> None:
    """Drop a format from the page cache; no process may have it mapped."""
    gc.collect()
    for file in files(path):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_through(path: Path) -> int:
    """Read all files from end to end; the bytes."""
    buffer, total = bytearray(2**20), 0
    for file in files(path):
        with file.open("rb", buffering=0) as handle:
            while size := handle.readinto(buffer):
                total += size
    return total


class Bench:
    """Writes one corpus in all formats to a folder, and measures the reading speeds."""

    def __init__(self, folder: Path, tokens: int, width: int, kept: int) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.zarr, self.h5 = folder / "a.zarr", folder / "a.h5"
        make_store(self.zarr, tokens, features_of(width, kept))
        convert(self.zarr, self.h5)
        self.corpus = Corpus(open_store(self.zarr))
        self.tokens = int(self.corpus.store.meta["tokens"])
        self.missing: dict[str, str] = {}
        self.peers: list[tuple[Peer, Path]] = []
        for number, peer in enumerate(peers(self.zarr, self.h5)):
            path = peer.path if isinstance(peer, Stream) else folder / f"peer{number}"
            try:
                peer.write(self.corpus, path)
                self._check(peer, path)
                self.peers.append((peer, path))
            except ImportError as error:
                self.missing[peer.name] = f"not installed ({error.name})"

    def _check(self, peer: Peer, path: Path) -> None:
        totals = sums(peer.open(self.corpus, path)(0))
        if not self.peers:
            self.expected = totals
        if totals != self.expected:
            raise StoreError(f"{peer.name} does not deliver what was written: {totals}")

    def disk(self, path: Path) -> float:
        """Return the bytes a token."""
        return sum(file.stat().st_size for file in files(path)) / self.tokens

    def warm(self, rounds: int) -> list[list[object]]:
        """Return a row for each reader: bytes a token, tokens a second and a CPU second, ratios."""
        speeds: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer, _ in self.peers}
        for _ in range(rounds):
            for peer, path in self.peers:
                speeds[peer.name] += together(self.zarr, [(peer, path)])
        rows: list[list[object]] = []
        ours = np.median(speeds[self.peers[0][0].name], axis=0)
        for peer, path in self.peers:
            median = np.median(speeds[peer.name], axis=0)
            printed = [
                f"{speed:,.0f}" for speed in (median[0], max(speeds[peer.name])[0], median[1])
            ]
            ratios = [f"{ratio:.2f}" for ratio in ours / median]
            rows.append([peer.name, self.disk(path), *printed, *ratios])
        return rows + [[name, why, *[""] * 5] for name, why in self.missing.items()]

    def cold(self, rounds: int) -> list[list[object]]:
        """Return a row for each reader: tokens a second from the disk, and of reading files."""
        self.corpus.store.close()
        rows: list[list[object]] = []
        for peer, path in self.peers:
            if peer.name not in COLD:
                continue
            speeds, plain = [], []
            for number in range(rounds):
                self.corpus.batches(number)
                self.corpus.store.close()
                evict(path)
                begin = time.perf_counter()
                read_through(path)
                plain.append(self.tokens / (time.perf_counter() - begin))
                evict(path)
                begin = time.perf_counter()
                for _ in peer.open(self.corpus, path)(number):
                    pass
                speeds.append(self.tokens / (time.perf_counter() - begin))
            speed, limit = statistics.median(speeds), statistics.median(plain)
            rows.append([peer.name, f"{speed:,.0f}", f"{limit:,.0f}", f"{speed / limit:.0%}"])
        return rows

    def scaling(self, rounds: int) -> float:
        """Return the speed of two processes that read the Zarr store, relative to one process."""
        halves: list[tuple[Peer, Path]] = [
            (Stream("half", self.zarr, half=half), self.zarr) for half in (0, 1)
        ]
        ratios = []
        for _ in range(rounds):
            alone = np.median([speed for speed, _ in together(self.zarr, halves[:1])])
            both = sum(speed for speed, _ in together(self.zarr, halves)) / EPOCHS
            ratios.append(float(both / alone))
        return statistics.median(ratios)


def _read(zarr: Path, peer: Peer, path: Path, ready: Any, speeds: Any) -> None:
    epoch = peer.open(Corpus(open_store(zarr)), path)
    consume(epoch(0))  # for readers that are opened once
    ready.wait()
    speeds.put([consume(epoch(number)) for number in range(1, EPOCHS + 1)])


def together(zarr: Path, readers: list[tuple[Peer, Path]]) -> list[tuple[float, float]]:
    """Measure a few epochs of each reader, each in a separate process: some readers leave threads
    behind that would slow down the others."""
    context = multiprocessing.get_context("spawn")
    ready, speeds = context.Barrier(len(readers)), context.Queue()
    started = [context.Process(target=_read, args=(zarr, *r, ready, speeds)) for r in readers]
    for process in started:
        process.start()
    results = [speed for _ in started for speed in speeds.get(timeout=600)]
    for process in started:
        process.join()
    return results


def versions() -> str:
    """Return the versions of the peers that are installed."""
    installed = []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(installed)


def measure(folder: Path, tokens: int, width: int, kept: int, rounds: int, results: Path) -> None:
    """Measure everything and publish it as a section of `results`."""
    bench = Bench(folder, tokens, width, kept)
    warm = bench.warm(rounds)
    cold = bench.cold(rounds)
    lengths = bench.corpus.lengths
    settings = (
        f"`python -m benchmarks.reading --tokens {tokens} --width {width} --kept {kept} --rounds"
        f" {rounds}`. A synthetic store with the default codec: {bench.tokens:,} tokens in"
        f" {len(lengths):,} sequences (median {np.median(lengths):.0f}, sum L^2 / tokens"
        f" {(lengths**2).sum() / lengths.sum():.0f}), hidden mean, attention mean. Each reader"
        " delivers shuffled batches of values as stored, in one process. Medians of"
        f" {rounds} interleaved rounds; {versions()}."
    )
    body = [
        table(WARM, warm),
        table(("cold", "tokens/s", "its files read end to end, tokens/s", "share"), cold),
        "Two processes with half of the Zarr store each reach"
        f" {bench.scaling(min(rounds, 5)):.2f} times the speed of one process.",
    ]
    publish(f"Reading, d={width}, top-{kept}", settings, "\n\n".join(body), results)
