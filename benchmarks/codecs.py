"""What each codec costs on disk and in precision, beside float16 arrays.

python -m benchmarks.codecs --model DIR --corpus TEXT [--tokens N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import NOVELS, TEACHER, publish, table, whole_size
from store import FeatureStore, open_store
from store.console import command_errors
from store.convert import convert
from teacher_dump.dump import dump
from teacher_dump.options import DumpOptions

LAYOUTS = ("zarr", "h5")
HEAD = (
    "codec",
    "disk B/token zarr",
    "disk B/token h5",
    "of float16 arrays",
    "hidden relative L2, mean",
    "99.9 %",
    "log-probability, max",
    "KL, mean",
    "attention, max",
)


def float16_bytes(store: FeatureStore) -> float:
    """Bytes a token of plain float16 arrays (ids in 4 bytes) with the same features."""
    features = store.features
    kept = features.logits.size if features.logits else 0
    squares = sum(len(store[i].token_ids) ** 2 for i in range(len(store)))
    maps = squares / store.meta["tokens"] * len(features.attention)
    return 2 * features.width * len(features.hidden) + kept * 6 + 2 * maps


def errors(exact: FeatureStore, other: FeatureStore) -> dict[str, float]:
    """Of every feature of every sequence, against the exact store."""
    hidden, logprobs, maps, kls = [], [0.0], [0.0], []
    for i in range(len(exact)):
        want, got = exact[i].views[0], other[i].views[0]
        for name in exact.features.hidden:
            difference = np.linalg.norm(got.hidden[name] - want.hidden[name], axis=1)
            hidden.append(difference / np.linalg.norm(want.hidden[name], axis=1))
        for name in exact.features.attention:
            maps.append(np.abs(got.attention[name] - want.attention[name]).max())
        if exact.features.logits:
            logprobs.append(np.abs(got.logits.logprobs - want.logits.logprobs).max())
            kls.append(divergence(want.logits, got.logits))
    relative = np.concatenate(hidden)
    return {
        "mean": float(relative.mean()),
        "p99.9": float(np.quantile(relative, 0.999)),
        "logprob": float(max(logprobs)),
        "kl": float(np.concatenate(kls).mean()) if kls else 0.0,
        "attention": float(max(maps)),
    }


def divergence(want: Any, got: Any) -> np.ndarray:
    """KL [T] from the exact kept distribution, its rest as one outcome, to the decoded one."""
    p, q = (
        np.concatenate([x.logprobs, x.rest[:, None]], axis=1).astype(float) for x in (want, got)
    )
    p, q = np.exp(p), np.exp(q)
    q = q / q.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0).sum(axis=1)


def measure(options: DumpOptions, folder: Path) -> tuple[list[list[object]], FeatureStore]:
    """Dump once exactly, recode, and compare; a row a codec."""
    dump(options)
    exact = open_store(options.out)
    plain = float16_bytes(exact)
    rows: list[list[object]] = []
    for codec in ("exact", "default", "small"):
        sizes, found = [], {}
        for layout in LAYOUTS:
            path = folder / f"{codec}.{layout}"
            if path != options.out:
                convert(options.out, path, codec)
            store = open_store(path)
            found = errors(exact, store)
            sizes.append(whole_size(path) / exact.meta["tokens"])
        rows.append([codec, *sizes, f"{sizes[0] / plain:.0%}", *found.values()])
    return rows, exact


@click.command()
@click.option("--model", default=str(TEACHER) if TEACHER.exists() else "minilm")
@click.option("--corpus", default=str(NOVELS) if NOVELS.exists() else "python-docs")
@click.option("--tokens", default=50_000)
@click.option("--logits", default="topk:16" if TEACHER.exists() else "none")
@command_errors
def main(model: str, corpus: str, tokens: int, logits: str) -> None:
    """Print the table and put it into RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        options = DumpOptions(
            model=model,
            corpus=(corpus,),
            out=Path(name) / "exact.zarr",
            limit=tokens,
            logits=logits,
            codec="exact",
            weights=False,  # they do not grow with the corpus
            max_length=128,
        )
        rows, exact = measure(options, Path(name))
        publish(
            "Codecs",
            f"`python -m benchmarks.codecs`; teacher {Path(model).name} (d={exact.features.width}),"
            f" {exact.meta['tokens']:,} tokens, {logits}, hidden mean, attention mean, tokenizer"
            f" included ({len(exact.teacher_file('tokenizer.json')) / exact.meta['tokens']:.0f}"
            f" B/token); float16 arrays would take {float16_bytes(exact):.0f} B/token. All errors"
            " against float32.",
            table(HEAD, rows),
        )


if __name__ == "__main__":
    main()
