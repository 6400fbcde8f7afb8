"""Describe what a store holds, for people and as JSON, and its size in bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from teachonce.store.containers.hdf5 import file as hdf5
from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.paths import local_staging_of
from teachonce.store.containers.zarr import tree as zarr
from teachonce.store.errors import StoreError
from teachonce.store.format.features import EmbeddingSpec, Features, TaskSpec
from teachonce.store.format.identity import (
    corpora,
    corpus_sources,
    count_numbers,
    object_in,
    parse_runs,
)
from teachonce.store.format.layout import ArraySpec, Counts, part_arrays
from teachonce.store.read.store import FeatureStore
from teachonce.support.console import counted, readable

METADATA = ""
"""Key for the bytes of groups, attributes and indices, which belong to no array."""
SOURCES = 8  # shown of a corpus
LABELS = 20  # shown of a task
OPTIONAL = ("logits", "hidden", "attention")  # features that an option of teacher-dump leaves out
HASH = 12  # characters shown of a hash
# The end of a file's path, after the path of its array or group: `/c/0` of a shard, or a file name.
OWN_NAME = re.compile(r"/c(/\d+)+$|/?[^/]+$")


def stored_sizes(path: Path, part: int | None = None) -> dict[str, int]:
    """Return the size in bytes of every array in a part of an unfinished store, by path.

    The sizes are sizes on the disk; METADATA is the key of all other bytes. If `part` is None,
    return the sizes of the arrays outside the parts.
    """
    staging, sizes = local_staging_of(path), Counter[str]()
    if isinstance(staging, Hdf5Staging):
        file = path if part is None else staging.parts / f"{part}.h5"
        prefix = "" if part is None else f"parts/{part}/"
        return {name.removeprefix(prefix): size for name, size in _hdf5_sizes(file)}
    for name, file in _zarr_files(path if part is None else path / "parts" / str(part)):
        if part is not None or name.split("/")[0] != "parts":
            sizes[METADATA if file.name == "zarr.json" else name] += file.stat().st_size
    return sizes


def stored_rows(path: Path, spec: ArraySpec, rows: int) -> int:
    """Return how many rows an array of `rows` rows takes on the disk, with the last chunk's
    padding."""
    # Only chunks that are not compressed are padded on the disk.
    if not spec.per_token or spec.packing is not None:
        return rows
    chunk = hdf5.TOKEN_ROWS if path.suffix == ".h5" else zarr.TOKEN_ROWS
    return rows if rows < chunk else -(-rows // chunk) * chunk


def bytes_on_disk(path: str) -> dict[str, int] | None:
    """Return the sizes in bytes of the parts (`features`), of weights, head and tokenizer
    (`teacher`), and of all files (`total`); None for a URL."""
    return None if "://" in path else _on_disk(Path(path))[0]


def _on_disk(target: Path) -> tuple[dict[str, int], Counter[str]]:
    """Return what `bytes_on_disk` returns, and the size in bytes of each kind of feature in all
    parts. The key "" has the bytes that belong to no feature."""
    roots, kinds, total = Counter[str](), Counter[str](), 0
    zarr_sizes = ((name, file.stat().st_size) for name, file in _zarr_files(target))
    for name, size in zarr_sizes if target.is_dir() else _all_hdf5_sizes(target):
        root, _, path = name.partition("/")
        roots[root] += size
        total += size
        if root == "parts":
            kinds[path.partition("/")[2].rpartition("/")[0]] += size
    return {"features": roots["parts"], "teacher": roots["teacher"], "total": total}, kinds


def _zarr_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each file of a store after the path of its array or group."""
    for file in folder.rglob("*"):
        if file.is_file():
            yield OWN_NAME.sub("", file.relative_to(folder).as_posix()), file


def _all_hdf5_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the path and the size in bytes of each array of a store. For each file also yield its
    other bytes, under METADATA or, for the file of a part, "parts"."""
    # Until it is sealed, an HDF5 store has a file for each part (FORMAT.md, section 9).
    for file in (path, *hdf5.parts_folder(path).rglob("*")):
        if file.is_file():
            for name, size in _hdf5_sizes(file):
                yield name or ("parts" if file != path else METADATA), size


def _hdf5_sizes(file: Path) -> list[tuple[str, int]]:
    """List the arrays of an HDF5 file with their sizes in bytes (no arrays if it is being written),
    then METADATA with the size of all other bytes."""
    sizes = list[tuple[str, int]]()
    with suppress(StoreError), closing(Hdf5Source(str(file))) as source:
        sizes = [(name, source.stored_bytes(name)) for name in source.arrays()]
    return [*sizes, (METADATA, file.stat().st_size - sum(size for _, size in sizes))]


def _encoded(store: FeatureStore) -> Counter[str]:
    """Return the size in bytes of each kind of feature, encoded but not compressed."""
    kinds, totals = Counter[str](), store.manifest.totals
    extra_rows = len(store.manifest.parts) - 1  # some arrays have one row more per part (edges)
    empty = part_arrays(store.features, Counts.of_flat([0] * len(totals.flat())))
    for name, spec in part_arrays(store.features, totals).items():
        kinds[name.rpartition("/")[0]] += spec.nbytes + extra_rows * empty[name].nbytes
    return kinds


def read_by_default(features: Features) -> set[str]:
    """Return the groups of features that students are trained on if no --loss is given."""
    # These are the defaults of student_train, which the store cannot import;
    # tests/end_to_end/test_plan.py compares both.
    states = {"hidden"} if features.hidden else set[str]()
    if task := features.task:
        return {"task"} if task.output_kind == "numbers" else {"task"} | states
    if features.embedding:
        return {"embedding"} | states
    if features.logits and (features.logits.next_token or not states):
        return {"logits"}
    return states


def unread_line(store: FeatureStore, sizes: Mapping[str, int] | None = None) -> str:
    """Describe in a line the features that no default loss reads, and the options with which a dump
    omits them; "" if there are none.

    sizes: the bytes of each kind of feature. None: the bytes on the disk or, for a store behind a
        URL, before compression.
    """
    if sizes is None:
        sizes = _encoded(store) if "://" in store.path else _on_disk(Path(store.path))[1]
    read, unread = read_by_default(store.features), Counter[str]()
    for kind, size in sizes.items():
        group = kind.partition("/")[2].partition("/")[0] if kind.startswith("view") else ""
        if group in OPTIONAL and group not in read:
            unread[group] += size
    if not unread:
        return ""
    names = [group for group in OPTIONAL if group in unread]
    listed = f"{' and '.join(names)}, {readable(unread.total())}, which no default loss of"
    if not read:
        return f"{listed} student-train reads; give it --loss"
    options = " ".join(f"--{name} none" for name in names)
    # teacher-dump refuses `--logits none` together with `--head mlm` or `--head causal`.
    also = ", and leave --head out" if "logits" in names else ""
    return f"{listed} student-train reads; to dump without them, give {options}{also}"


def describe(store: FeatureStore) -> dict[str, Any]:
    """Return everything that `feature-store info --json` prints."""
    tokens, encoded = max(1, store.meta["tokens"]), dict(sorted(_encoded(store).items()))
    disk, kinds = (None, None) if "://" in store.path else _on_disk(Path(store.path))
    return store.meta | {
        "path": store.path,
        "content": store.manifest.content(),
        "bytes_on_disk": disk,
        "feature_bytes_per_token_on_disk": disk and round(disk["features"] / tokens, 2),
        "bytes_by_feature": kinds and {kind: kinds[kind] for kind in encoded},
        "bytes_per_token_encoded": {kind: round(n / tokens, 2) for kind, n in encoded.items()},
        "teacher_files": sorted(store.teacher_files()),
        "teacher_weights": len(store.teacher_weights()),
    }


def _trained_on(features: Features) -> str:
    """Describe which tokens students are trained on; "" for all."""
    context = ["without the first tokens of windows that only give context"] * features.context
    of_chats = "marked tokens of chats" if features.messages else "marked tokens"
    return ", ".join([*[of_chats] * features.learn, *context])


def info_lines(store: FeatureStore, about: Mapping[str, Any] | None = None) -> list[str]:
    """Describe a store for people, line by line, from the result of `describe`."""
    about, features = about or describe(store), store.features
    rows = [
        ("store", f"{store.path} (version {about['version']}, {about['state']})"),
        ("teacher", _teacher(store.identity.get("teacher"))),
        *(("corpus", line) for line in _corpus(store.identity.get("corpus"))),
        ("size", store.counts_line()),
        *([("trained on", tokens)] if (tokens := _trained_on(features)) else []),
        ("hidden", _hidden(features)),
        ("attention", ", ".join(features.attention) or "none"),
        ("logits", _logits(features)),
        *([("task", _task(task))] if (task := features.task) else []),
        *([("embedding", _embedding(vector))] if (vector := features.embedding) else []),
        *([("mixed vocab", _pairs(mixed))] if (mixed := store.identity.get("mixed_vocab")) else []),
        ("views", f"{features.views}"),
        ("codec", features.codec),
        ("arguments", _pairs(store.identity.get("arguments", {}))),
        ("software", _pairs(store.meta["software"])),
        ("created", about["created"]),
        ("content", f"SHA-256 {about['content']}"),
        *(("on disk", line) for line in _disk(about)),
        *([("unread", line)] if (line := unread_line(store, about["bytes_by_feature"])) else []),
    ]
    previous, lines = "", []
    for name, value in rows:
        lines.append(f"{'' if name == previous else name:<11} {value}")
        previous = name
    return lines + _by_feature(about)


def _hidden(features: Features) -> str:
    """Return the names of the states, and their hidden size."""
    names = ", ".join(features.hidden)
    return f"{names} (hidden size {features.width})" if names else "none"


def _by_feature(about: Mapping[str, Any]) -> list[str]:
    """Return a table of bytes per token by feature: before compression and, for a store on this
    machine, on the disk."""
    encoded, disk = about["bytes_per_token_encoded"], about["bytes_by_feature"]
    rows = {kind: [f"{size:>9.2f}"] for kind, size in encoded.items()}
    rows["all"] = [f"{sum(encoded.values()):>9.2f}"]
    if disk:
        tokens = max(1, about["tokens"])
        for kind, size in {**disk, "all": sum(disk.values())}.items():
            rows[kind] += [f"{size / tokens:>9.2f}", f"{readable(size):>9}"]
    heading = "bytes per teacher token before compression" + (
        ", on the disk, and in all" if disk else ""
    )
    return [f"{heading}:", *(f"  {kind:<28} {'  '.join(row)}" for kind, row in rows.items())]


def _disk(about: Mapping[str, Any]) -> Iterator[str]:
    if disk := about["bytes_on_disk"]:
        per_token = about["feature_bytes_per_token_on_disk"]
        yield f"features {readable(disk['features'])}, {per_token:,.2f} bytes per teacher token"
        yield f"teacher's weights and files {readable(disk['teacher'])}"


def _logits(features: Features) -> str:
    if (logits := features.logits) is None:
        return "none"
    following = " of the next token" if logits.next_token else ""
    following += ", whose own log-probability is stored" if logits.observed else ""
    return f"{logits.tier}:{logits.size} of {features.vocabulary:,}{following}"


def _task(task: TaskSpec) -> str:
    shown = ", ".join(task.labels[:LABELS])
    rest = f", and {len(task.labels) - LABELS:,} more" if len(task.labels) > LABELS else ""
    later = f"; {task.later_label} labels later pieces of a word" if task.later_label else ""
    pairs = " of pairs of texts" if task.separator else ""
    if task.is_score and not task.problem_type:
        return f"a score{pairs}"
    if task.output_kind == "numbers":
        return f"regression{pairs}, {counted(len(task.labels), 'number')}: {shown}{rest}"
    if task.output_kind == "several labels":
        return f"any of {counted(len(task.labels), 'label')}{pairs}: {shown}{rest}"
    return f"{task.kind}{pairs}, {counted(len(task.labels), 'label')}: {shown}{rest}{later}"


def _embedding(spec: EmbeddingSpec) -> str:
    length = ", of length 1" if spec.normalised else ""
    prompt = f", prompt {spec.prompt!r}" if spec.prompt else ""
    parallel = ", of a parallel text" if spec.parallel else ""
    return f"size {spec.width}, {spec.pooling}{length}{prompt}{parallel}"


def _teacher(teacher: Any) -> str:
    if not isinstance(teacher, Mapping):
        return str(teacher)
    details = {key: value for key, value in teacher.items() if key != "id"}
    return f"{teacher.get('id', 'unknown')} ({_pairs(details)})"


def _corpus(corpus: Any) -> Iterator[str]:
    """Yield a line for each of the first SOURCES sources, then the number of others."""
    lines = list(_sources(corpus))
    yield from lines[:SOURCES]
    if len(lines) > SOURCES:
        yield f"and {counted(len(lines) - SOURCES, 'more source')}"
    fields = corpus if isinstance(corpus, Mapping) else {}
    if grown_from := object_in(corpus, "grown_from"):
        yield f"grown from a store of content {_readable(grown_from.get('content'))}"
    if runs := parse_runs(fields.get("forgotten")):
        yield f"without {counted(count_numbers(runs), 'document')} that were forgotten"


def _sources(corpus: Any) -> Iterator[str]:
    for part in corpora(corpus):
        if not (sources := corpus_sources(part)):
            yield _pairs(part)
        for source in sources:
            fields = {key: value for key, value in source.items() if key not in ("name", "kind")}
            fields["column"] = part.get("text_column")
            yield f"{source.get('name')} ({_pairs(fields)})"


def _pairs(values: Any) -> str:
    """Join pairs as `name value`. Hashes are cut, and None is omitted."""
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(
        f"{key.replace('_', ' ')} {_readable(value)}"
        for key, value in values.items()
        if value is not None
    )


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    hexadecimal = len(text) >= 32 and set(text) <= set("0123456789abcdef")
    return text[:HASH] if hexadecimal else text
