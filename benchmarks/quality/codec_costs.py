"""Bytes and errors of every codec, beside float16 arrays.

python -m benchmarks.quality.codec_costs --model DIR --corpus TEXT [--tokens N]
python -m benchmarks.quality.codec_costs --store STORE [--tokens N]

The second measures the logits of a decoder alone, from its store of the 64 best: as of a teacher
with a large vocabulary. Each id is replaced by a random one, so that small ids are not frequent.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np

from benchmarks.common.results import TEACHER, of_text, publish, table, whole_size
from teachonce.store import FeatureStore, LogitsSpec, Sequences, StoreWriter, open_store
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


WIDE, KEPT = 151_936, (50, 64)  # the vocabulary of Qwen2.5
OF_DECODERS = ("codec", "logits", "Zarr, B/token", "an entry", "HDF5, B/token", "an entry")


def relabelled(source: FeatureStore, path: Path, codec: str, kept: int, tokens: int) -> float:
    """Write the first tokens of a store with its `kept` best logits, each id replaced by a random
    one of WIDE; return the bytes a token of the logits on the disk."""
    ends = np.cumsum([len(record.token_ids) for record in source])
    records = source[: max(1, int(np.searchsorted(ends, tokens, "right")))]
    count = int(ends[len(records) - 1])
    wide = np.random.default_rng(0).permutation(WIDE)[: source.features.vocabulary]
    spec = LogitsSpec("topk", kept, next_token=True, ranked=True)
    features = replace(source.features, hidden=(), attention=(), logits=spec, vocabulary=WIDE)
    features = replace(features, codec=codec, form=0)
    identity = {"teacher": {"id": "relabelled"}, "corpus": {"tokens": count}}
    writer = StoreWriter.create_or_resume(path, identity, features)
    part = writer.part(0, [len(record.token_ids) for record in records])
    whole: dict[str, Any] = {
        key: np.concatenate([getattr(r, key) for r in records])
        for key in ("token_ids", "offsets", "special")
    }
    whole |= {
        key: np.array([getattr(r, key) for r in records])
        for key in ("document", "document_begin", "hard_cut")
    }
    whole["token_ids"] = wide[whole["token_ids"]]
    part.set_sequences(Sequences([r.text for r in records], **whole))
    for record, begin in zip(records, part.token_start[:-1].tolist(), strict=True):
        best, rows = record.views[0].logits, begin + np.arange(len(record.token_ids))
        left_out = np.c_[best.rest, best.logprobs[:, kept:]]
        rest = np.logaddexp.reduce(left_out, axis=1)
        put = wide[best.ids[:, :kept]], best.logprobs[:, :kept], rest, best.log_partition
        part.put_topk(0, rows, *put)
    writer.publish(part)
    writer.seal()
    if path.is_dir():
        return kinds_on_disk(path, count)[-1]
    with h5py.File(path) as file:
        arrays = file["parts/0/view0/logits"].values()
        return float(sum(array.id.get_storage_size() for array in arrays) / count)


def measure_decoder(store: FeatureStore, tokens: int, folder: Path) -> Rows:
    """Return rows of `OF_DECODERS`, for every codec and number of logits."""
    rows: Rows = []
    for codec in LEVELS:
        for kept in KEPT:
            row: list[Any] = [codec, f"topk:{kept}"]
            for layout in LAYOUTS:
                path = folder / f"{codec}-{kept}.{layout}"
                size = relabelled(store, path, codec, kept, tokens)
                row += [size, size / kept]
            rows.append(row)
    return rows


def publish_decoder(path: Path, tokens: int, results: Path) -> None:
    """Measure the logits of a decoder's store, and put the table into RESULTS.md."""
    store = open_store(path)
    with tempfile.TemporaryDirectory() as name:
        rows = measure_decoder(store, tokens, Path(name))
    publish(
        "Codecs: logits of a decoder",
        f"`python -m benchmarks.quality.codec_costs --store STORE --tokens {tokens}`; the first"
        f" {tokens:,} tokens of a store of {store.identity['teacher']['id']}, whose"
        f" {store.features.vocabulary:,} ids are replaced by random ones of {WIDE:,}. Files of the"
        " logits alone: ids, log-probabilities, rest and partition.",
        f"{table(OF_DECODERS, rows)}\n\n{PUBLISHED}",
        results,
    )


@click.command()
@of_text(tokens=50_000)
@click.option("--logits", multiple=True, default=LOGITS)
@click.option("--store", type=click.Path(path_type=Path), help="A store of a decoder, topk:64.")
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    results: Path,
    logits: tuple[str, ...],
    store: Path | None,
) -> None:
    """Print the tables and put them into RESULTS.md."""
    if store:
        publish_decoder(store, tokens, results)
        return
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
