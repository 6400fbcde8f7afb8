"""Describe what a store holds, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from store.containers.hdf5.tree import Hdf5Source
from store.format.features import EmbeddingSpec, Features, TaskSpec
from store.format.layout import Counts, part_arrays
from store.read.store import FeatureStore
from support.console import counted, readable

SOURCES = 8  # shown of a corpus
LABELS = 20  # shown of a task
HASH = 12  # characters shown of a hash


def bytes_on_disk(path: str) -> dict[str, int] | None:
    """Bytes of the parts (`features`), of weights, head and tokenizer (`teacher`), and of
    everything with metadata and gaps (`total`); None for a URL."""
    if "://" in path:
        return None
    target = Path(path)
    if target.is_dir():
        sizes = {group: _size(target / group) for group in ("parts", "teacher")}
        total = _size(target)
    else:
        unfinished = _size(Path(f"{path}.parts"))
        sizes = _datasets(target)
        sizes["parts"] += unfinished
        total = target.stat().st_size + unfinished
    return {"features": sizes["parts"], "teacher": sizes["teacher"], "total": total}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _datasets(path: Path) -> Counter[str]:
    """Bytes of the datasets of an HDF5 file, by their group at the root."""
    sizes = Counter[str]()
    source = Hdf5Source(str(path))
    for name in source.arrays():
        sizes[name.split("/")[0]] += source.stored_bytes(name)
    return sizes


def _encoded(store: FeatureStore) -> Counter[str]:
    """Bytes of each kind of feature, encoded but not compressed."""
    kinds, totals = Counter[str](), store.manifest.totals
    more = len(store.manifest.parts) - 1  # of a part's arrays some have a row more than it counts
    none = part_arrays(store.features, Counts.of_flat([0] * len(totals.flat())))
    for name, spec in part_arrays(store.features, totals).items():
        size = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
        over = int(np.prod(none[name].shape, dtype=np.int64)) * spec.dtype.itemsize
        kinds[name.rpartition("/")[0]] += size + more * over
    return kinds


def describe(store: FeatureStore) -> dict[str, Any]:
    """All facts of `feature-store info`, as JSON."""
    tokens, disk = max(1, store.meta["tokens"]), bytes_on_disk(store.path)
    encoded = sorted(_encoded(store).items())
    return store.meta | {
        "path": store.path,
        "content": store.manifest.content(),
        "bytes_on_disk": disk,
        "feature_bytes_per_token_on_disk": disk and round(disk["features"] / tokens, 2),
        "bytes_per_token_encoded": {kind: round(size / tokens, 2) for kind, size in encoded},
        "teacher_files": sorted(store.teacher_files()),
        "teacher_weights": len(store.teacher_weights()),
    }


def info_lines(store: FeatureStore, about: Mapping[str, Any] | None = None) -> list[str]:
    """Describe a store for people, line by line, by what `describe` tells of it."""
    about, features = about or describe(store), store.features
    size = ", ".join(counted(about[what], what[:-1]) for what in ("sequences", "tokens", "parts"))
    rows = [
        ("store", f"{store.path} (version {about['version']}, {about['state']})"),
        ("teacher", _teacher(store.identity.get("teacher"))),
        *(("corpus", line) for line in _corpus(store.identity.get("corpus"))),
        ("size", size),
        ("hidden", f"{', '.join(features.hidden) or 'none'} ({features.width} wide)"),
        ("attention", ", ".join(features.attention) or "none"),
        ("logits", _logits(features)),
        *([("task", _task(task))] if (task := features.task) else []),
        *([("embedding", _embedding(vector))] if (vector := features.embedding) else []),
        *([("mixed vocab", _words(mixed))] if (mixed := store.identity.get("mixed_vocab")) else []),
        ("views", f"{features.views}"),
        ("codec", features.codec),
        ("arguments", _words(store.identity.get("arguments", {}))),
        ("software", _words(store.meta["software"])),
        ("created", about["created"]),
        ("content", f"SHA-256 {about['content']}"),
        *(("on disk", line) for line in _disk(about)),
    ]
    previous, lines = "", []
    for name, value in rows:
        lines.append(f"{'' if name == previous else name:<11} {value}")
        previous = name
    lines.append("bytes per token before compression:")
    kinds = about["bytes_per_token_encoded"].items()
    lines += [f"  {kind:<28} {value:>9.2f}" for kind, value in kinds]
    return lines + [f"  {'all':<28} {sum(value for _, value in kinds):>9.2f}"]


def _disk(about: Mapping[str, Any]) -> Iterator[str]:
    if disk := about["bytes_on_disk"]:
        each = about["feature_bytes_per_token_on_disk"]
        yield f"features {readable(disk['features'])}, {each:,.2f} bytes per token"
        yield f"teacher's weights and files {readable(disk['teacher'])}"


def _logits(features: Features) -> str:
    if (logits := features.logits) is None:
        return "none"
    following = ", each of the token after" if logits.next_token else ""
    return f"{logits.tier}:{logits.size} of {features.vocabulary:,}{following}"


def _task(task: TaskSpec) -> str:
    shown = ", ".join(task.labels[:LABELS])
    more = f", and {len(task.labels) - LABELS:,} more" if len(task.labels) > LABELS else ""
    later = f"; {task.later_label} is of word pieces after the first" if task.later_label else ""
    pairs = " of pairs of texts" if task.separator else ""
    if task.scores:
        return f"a score{pairs}"
    return f"{task.kind}{pairs}, {counted(len(task.labels), 'label')}: {shown}{more}{later}"


def _embedding(spec: EmbeddingSpec) -> str:
    length = ", of length 1" if spec.normalised else ""
    prompt = f", prompt {spec.prompt!r}" if spec.prompt else ""
    return f"{spec.width} wide, {spec.pooling}{length}{prompt}"


def _teacher(teacher: Any) -> str:
    if not isinstance(teacher, Mapping):
        return str(teacher)
    others = {key: value for key, value in teacher.items() if key != "id"}
    return f"{teacher.get('id', 'unknown')} ({_words(others)})"


def _corpus(corpus: Any) -> Iterator[str]:
    """One line for each of the first sources, and how many more there are."""
    found = list(_sources(corpus))
    yield from found[:SOURCES]
    if len(found) > SOURCES:
        yield f"and {counted(len(found) - SOURCES, 'more source')}"


def _sources(corpus: Any) -> Iterator[str]:
    merged, sources, column = (
        corpus.get(key) if isinstance(corpus, Mapping) else None
        for key in ("merged", "sources", "text_column")
    )
    if isinstance(merged, list):
        for inner in merged:
            yield from _sources(inner)
    elif isinstance(sources, list) and all(isinstance(source, Mapping) for source in sources):
        for source in sources:
            rest = {key: value for key, value in source.items() if key not in ("name", "kind")}
            yield f"{source.get('name')} ({_words(rest | {'column': column})})"
    else:
        yield _words(corpus)


def _words(values: Any) -> str:
    """Join `name value` pairs; hashes are cut, and values that are not set are left out."""
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(
        f"{key.replace('_', ' ')} {_word(value)}"
        for key, value in values.items()
        if value is not None
    )


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    hexadecimal = len(text) >= 32 and set(text) <= set("0123456789abcdef")
    return text[:HASH] if hexadecimal else text
