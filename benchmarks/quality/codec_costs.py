"""Bytes and errors of every codec, beside float16 arrays.

python -m benchmarks.quality.codec_costs --model DIR --corpus TEXT [--tokens N]
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common.results import TEACHER, of_text, publish, table, whole_size
from teachonce.store import FeatureStore, open_store
from teachonce.store.format.codecs.levels import LEVELS
from teachonce.store.tools.copy import convert
from teachonce.support.arrays import Array
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

LAYOUTS = ("zarr", "h5")
KINDS = ("text", "hidden", "attention", "logits")  # text with offsets and all else
HEAD = (
    "codec",
    "logits",
    "disk B/token zarr",
    "disk B/token h5",
    "of float16 arrays",
    "hidden relative L2, mean",
    "99.9 %",
    "log-probability, max",
    "KL, mean",
    "attention, max",
)
BY_KIND = ("codec", "logits", "text, tokens", "hidden", "attention", "logits", "an entry")
PUBLISHED = (
    "Logits alone as others publish them: DistillKit about 300 B/token (k=128) and 114-121 (k=50),"
    " Megatron-LM 5 B an entry."
)


def float16_bytes(store: FeatureStore) -> float:
    """Bytes a token of plain float16 arrays (ids in 4 bytes) with the same features."""
    features = store.features
    kept = features.logits.size if features.logits else 0
    squares = sum(len(store[i].token_ids) ** 2 for i in range(len(store)))
    maps = squares / store.meta["tokens"] * len(features.attention)
    return float(2 * features.width * len(features.hidden) + kept * 6 + 2 * maps)


def errors(exact: FeatureStore, other: FeatureStore) -> dict[str, float]:
    """Errors of every feature over all sequences, against the exact store."""
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


def divergence(want: Any, got: Any) -> Array:
    """KL [T] from the exact kept distribution, its rest as one outcome, to the decoded one."""
    p, q = (
        np.concatenate([x.logprobs, x.rest[:, None]], axis=1).astype(float) for x in (want, got)
    )
    p, q = np.exp(p), np.exp(q)
    q = q / q.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(p > 0, p * np.log(p / q), 0).sum(axis=1)
    return found


def kinds_on_disk(path: Path, tokens: int) -> list[float]:
    """Bytes a token of each of KINDS in the parts of a Zarr store, as the disk has them."""
    sizes = Counter[str]()
    for file in (path / "parts").rglob("*"):
        if file.is_file():
            kind = next((kind for kind in KINDS if kind in file.relative_to(path).parts), KINDS[0])
            sizes[kind] += file.stat().st_size
    return [sizes[kind] / tokens for kind in KINDS]


def safetensors_bytes(store: FeatureStore, path: Path) -> float:
    """Bytes a token of one safetensors file with the features in float16, ids in 4 bytes."""
    from safetensors.numpy import save_file

    arrays: dict[str, Array] = {}
    for number, sequence in enumerate(store):
        view = sequence.views[0]
        half = {**view.hidden, **{f"map {name}": each for name, each in view.attention.items()}}
        if view.logits:
            half["logprobs"] = view.logits.logprobs
            arrays[f"{number} ids"] = view.logits.ids.astype(np.int32)
        for name, each in half.items():
            arrays[f"{number} {name}"] = each.astype(np.float16)
    save_file(arrays, path)
    return path.stat().st_size / float(store.meta["tokens"])


Rows = list[list[Any]]
LOGITS = ("topk:16", "topk:64") if TEACHER.exists() else ("none",)  # minilm has no such head


def measure(options: DumpOptions, folder: Path) -> tuple[Rows, Rows, FeatureStore]:
    """Dump once exactly, recode and compare.

    Returns rows of `HEAD` (safetensors, then the codecs), rows of `BY_KIND`, and the exact store.
    """
    dump(options)
    exact = open_store(options.out)
    plain, tokens = float16_bytes(exact), exact.meta["tokens"]
    loose = safetensors_bytes(exact, folder / "a.safetensors")
    rows: Rows = [["float16, safetensors", options.logits, loose, "", f"{loose / plain:.0%}"]]
    rows[0] += [""] * (len(HEAD) - len(rows[0]))
    kinds: Rows = []
    for codec in LEVELS:
        sizes, found = [], {}
        for layout in LAYOUTS:
            path = folder / f"{codec}.{layout}"
            if path != options.out:
                convert(options.out, path, codec)
            store = open_store(path)
            found = errors(exact, store)
            sizes.append(whole_size(path) / tokens)
        rows.append([codec, options.logits, *sizes, f"{sizes[0] / plain:.1%}", *found.values()])
        of_kinds = kinds_on_disk(folder / f"{codec}.zarr", tokens)
        entry = of_kinds[-1] / exact.features.logits.size if exact.features.logits else 0.0
        kinds.append([codec, options.logits, *of_kinds, entry])
    return rows, kinds, exact


@click.command()
@of_text(tokens=50_000)
@click.option("--logits", multiple=True, default=LOGITS)
@command_errors
def main(model: str, corpus: str, tokens: int, results: Path, logits: tuple[str, ...]) -> None:
    """Print the tables and put them into RESULTS.md."""
    rows: Rows = []
    kinds: Rows = []
    for kept in logits:
        with tempfile.TemporaryDirectory() as name:
            options = DumpOptions(
                model=model,
                corpus=(corpus,),
                out=Path(name) / "exact.zarr",
                limit=tokens,
                logits=kept,
                codec="exact",
                weights=False,  # they do not grow with the corpus
                max_length=128,
            )
            whole, apart, exact = measure(options, Path(name))
            rows += whole
            kinds += apart
            width, count = exact.features.width, exact.meta["tokens"]
            text = len(exact.teacher_file("tokenizer.json")) / count
    publish(
        "Codecs",
        f"`python -m benchmarks.quality.codec_costs --tokens {tokens}`; teacher {Path(model).name}"
        f" (d={width}),"
        f" {count:,} tokens, hidden mean, attention mean, tokenizer included ({text:.0f} B/token)."
        " All errors against float32.",
        f"{table(HEAD, rows)}\n\nBytes a token by kind, Zarr:\n\n{table(BY_KIND, kinds)}\n\n"
        f"{PUBLISHED}",
        results,
    )


if __name__ == "__main__":
    main()
