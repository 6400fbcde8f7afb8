"""Streaming a store over a network of some latency, compared with the local disk and other formats.

    python -m benchmarks.reading.far [--tokens N] [--rounds R] [--latencies 0,20,100]

A server on loopback delays the first byte of each answer; it has no bound on the bytes a second. A
synthetic store is read by an epoch of `fs.stream`, from its opening on: without a cache, with an
empty cache on the disk, and with the cache that this has left; so are MosaicML's and litdata's
formats of the same features, in their fastest form here, from the same server. All take turns, each
in a process of its own. A student that takes its steps from the store meanwhile shows what of the
latency reaches a training.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks.common.interleaved import Figures, alone
from benchmarks.common.object_server import BUCKET, ObjectServer, serving
from benchmarks.common.results import publish, results_option, table
from benchmarks.reading.record_formats import LitData, Mosaic
from benchmarks.reading.rounds import evict, versions
from benchmarks.reading.workload import BATCH_TOKENS, Corpus
from harness.synthetic import features_of, make_store
from teachonce.store import open_store
from teachonce.support.console import command_errors

STORE, CACHE = "a.zarr", "8GB"
LOCAL, EVICTED = "local disk, in memory", "local disk, evicted"
HEAD = (
    "latency, ms", "reader", "tokens/s", "share of the local disk, in memory",
    "share of the local disk, evicted", "first batch, s", "tokens/s after the first batch",
    "the same, share of the local disk, evicted", "requests per 1,000 tokens", "bytes per token",
)  # fmt: skip
STEPS = 160
STUDENT_HEAD = ("latency, ms", "student", "tokens/s", "share of the local disk", "first step, s")
Work = Callable[[], Figures]


def _figures(sizes: Iterator[int], started: float, seconds: float) -> Figures:
    """Return tokens per second since `started`, the seconds to the first batch, and tokens per
    second after it. Reading stops after `seconds`."""
    tokens, before, first = 0, 0, 0.0
    for size in sizes:
        if not first:
            before, first = size, time.perf_counter() - started
        tokens += size
        if time.perf_counter() - started > seconds:
            break
    total = time.perf_counter() - started
    speed = tokens / total
    after = (tokens - before) / (total - first) if tokens > before else speed
    return {"speed": speed, "first": first, "after": after, "tokens": tokens}


def read_ours(path: str, cache: str | None, seconds: float) -> Figures:
    """Stream an epoch of a store, from its opening."""
    import obstore.store  # noqa: F401  not a part of what is measured

    started = time.perf_counter()
    with open_store(path, cache=cache) as store:
        batches = store.stream(0, 0, BATCH_TOKENS)
        return _figures((len(batch.token_ids) for batch in batches), started, seconds)


def read_peer(peer: LitData | Mosaic, zarr: Path, url: str, local: Path, seconds: float) -> Figures:
    """Read an epoch of another format, from its opening."""
    corpus = Corpus(open_store(zarr))
    assert corpus.batch_sequences and corpus.names  # loaded before the measurement
    peer.load()
    started = time.perf_counter()
    epoch = peer.open_far(corpus, url, local)
    return _figures((len(arrays["token/id"]) for arrays in epoch(0)), started, seconds)


def train_student(path: str, cache: str | None, steps: int) -> Figures:
    """Train a small encoder on the stored states for some steps, from the opening."""
    import torch
    from transformers import BertConfig, BertModel

    from harness.synthetic import VOCABULARY

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=128,
    )  # fmt: skip
    model = BertModel(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    started = time.perf_counter()
    with open_store(path, cache=cache) as store:
        out = torch.nn.Linear(64, store.features.width)

        def train_steps() -> Iterator[int]:
            for _, batch in zip(range(steps), store.stream(0, 0, BATCH_TOKENS), strict=False):
                lengths = np.diff(batch.start)
                mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
                ids = torch.zeros(mask.shape, dtype=torch.long)
                ids[mask] = torch.from_numpy(batch.token_ids.astype(np.int64))
                targets = torch.from_numpy(batch.hidden["mean"].normalised().copy())
                states = model(ids, attention_mask=mask).last_hidden_state[mask]
                torch.nn.functional.mse_loss(out(states), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield len(targets)

        return _figures(train_steps(), started, float("inf"))


class Bench:
    """Holds a store, and its features in other formats, behind a server."""

    def __init__(self, folder: Path, tokens: int, width: int, kept: int, seconds: float) -> None:
        self.bucket, self.scratch = folder / "bucket", folder / "scratch"
        self.bucket.mkdir()
        self.zarr, self.seconds = self.bucket / STORE, seconds
        make_store(self.zarr, tokens, features_of(width, kept))
        with open_store(self.zarr) as store:
            self.tokens = int(store.meta["tokens"])
            corpus = Corpus(store)
            self.peers: dict[str, LitData | Mosaic] = {}
            self.missing: list[str] = []
            for peer in (Mosaic(fused=True), LitData(fused=True)):
                try:
                    peer.write(corpus, self.bucket / peer.package)
                    self.peers[peer.name] = peer
                except ImportError as error:
                    self.missing.append(f"{peer.package} is not installed ({error.name})")

    def readers(self) -> dict[str, Work]:
        """Return the readers that are measured at each latency, in this order."""
        near, url = str(self.zarr), f"s3://{BUCKET}"
        far, cache = f"{url}/{STORE}", f"disk:{self.scratch / 'cache'},{CACHE}"
        ours = partial(read_ours, seconds=self.seconds)
        readers: dict[str, Work] = {
            LOCAL: partial(ours, near, None),
            EVICTED: partial(ours, near, None),
            "ours, no cache": partial(ours, far, None),
            "ours, empty disk cache": partial(ours, far, cache),
            "ours, full disk cache": partial(ours, far, cache),
        }
        for name, peer in self.peers.items():
            local = self.scratch / peer.package
            address = f"{url}/{peer.package}"
            readers[f"{name}, empty folder"] = partial(
                read_peer, peer, self.zarr, address, local, self.seconds
            )
        return readers

    def students(self) -> dict[str, Work]:
        """Return the trainings that are measured at each latency."""
        near, far = str(self.zarr), f"s3://{BUCKET}/{STORE}"
        return {
            LOCAL: partial(train_student, near, None, STEPS),
            "ours, no cache": partial(train_student, far, None, STEPS),
        }

    def round(self, server: ObjectServer, works: dict[str, Work]) -> dict[str, Figures]:
        """Measure each reader once, one after another."""
        figures = {}
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for name, work in works.items():
            if name == EVICTED:
                evict(self.zarr)
            server.counts()
            figures[name] = alone(work)
            counts, tokens = server.counts(), figures[name]["tokens"]
            figures[name]["requests"] = 1000 * counts["requests"] / tokens
            figures[name]["bytes"] = counts["bytes"] / tokens
        return figures


def _ratio(runs: list[dict[str, Figures]], name: str, base: str, key: str = "speed") -> float:
    """Return the median of the ratios of rounds: neighbours in time are compared."""
    return statistics.median(run[name][key] / run[base][key] for run in runs)


def _median(runs: list[dict[str, Figures]], name: str, key: str) -> float:
    return statistics.median(run[name][key] for run in runs)


def _row(latency: float, name: str, runs: list[dict[str, Figures]]) -> list[object]:
    return [
        f"{latency:g}", name, f"{_median(runs, name, 'speed'):,.0f}",
        f"{_ratio(runs, name, LOCAL):.0%}", f"{_ratio(runs, name, EVICTED):.0%}",
        f"{_median(runs, name, 'first'):.2f}", f"{_median(runs, name, 'after'):,.0f}",
        f"{_ratio(runs, name, EVICTED, 'after'):.0%}", f"{_median(runs, name, 'requests'):.2f}",
        f"{_median(runs, name, 'bytes'):,.0f}",
    ]  # fmt: skip


def measure(bench: Bench, latencies: list[float], rounds: int) -> tuple[str, str]:
    """Return the tables of streams and of students."""
    runs: dict[float, list[dict[str, Figures]]] = {latency: [] for latency in latencies}
    students: list[dict[str, Figures]] = []
    with serving(bench.bucket) as server:
        for _ in range(rounds):
            for latency in latencies:
                server.delay(latency / 1000)
                runs[latency].append(bench.round(server, bench.readers()))
            students.append(bench.round(server, bench.students()))  # at the last latency
    rows = [_row(ms, name, figures) for ms, figures in runs.items() for name in figures[0]]
    trained = [
        [
            f"{latencies[-1]:g}", name, f"{_median(students, name, 'speed'):,.0f}",
            f"{_ratio(students, name, LOCAL):.0%}", f"{_median(students, name, 'first'):.2f}",
        ]
        for name in students[0]
    ]  # fmt: skip
    return table(HEAD, rows), table(STUDENT_HEAD, trained)


@click.command()
@click.option("--tokens", default=3_000_000)
@click.option("--width", default=384)
@click.option("--kept", default=16)
@click.option("--rounds", default=3)
@click.option("--latencies", default="0,20,100", help="Milliseconds.")
@click.option("--seconds", default=20.0, help="After which a slow reader is cut short.")
@results_option
@command_errors
def main(
    tokens: int, width: int, kept: int, rounds: int, latencies: str, seconds: float, results: Path
) -> None:
    """Print the tables and put them into RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), tokens, width, kept, seconds)
        streams, students = measure(bench, [float(ms) for ms in latencies.split(",")], rounds)
    settings = (
        f"`python -m benchmarks.reading.far --tokens {tokens} --width {width} --kept {kept}"
        f" --rounds {rounds} --latencies {latencies} --seconds {seconds:g}`. A synthetic store"
        f" with the default codec: {bench.tokens:,} tokens, hidden mean, attention mean, values as"
        " stored. A server runs on loopback in a separate process. Speeds include opening"
        f" the store. The figures are medians of {rounds} interleaved rounds and of their ratios;"
        f" the load was {os.getloadavg()[1]:.0f}; {versions()}."
    )
    body = [
        streams,
        *[f"Not measured: {why}." for why in bench.missing],
        "A student of one layer with hidden size 64 that trains on the stored hidden states:"
        f" {STEPS} steps of {BATCH_TOKENS:,} tokens with padding, including the wait for the first"
        " batch.",
        students,
    ]
    publish(f"Reading over a network, d={width}, top-{kept}", settings, "\n\n".join(body), results)


if __name__ == "__main__":
    main()
