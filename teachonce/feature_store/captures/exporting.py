"""Write stores in the formats of other tools."""

from __future__ import annotations

import shlex
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.compressed_logprobs import (
    exact_settings,
    index_bits,
    packed_ids,
)
from teachonce.feature_store.captures.distillkit import SETTINGS
from teachonce.store import EmbeddingSpec, FeatureStore, LogitsSpec, open_store
from teachonce.store.read import derived_copies
from teachonce.store.read.arrow import StoreTable
from teachonce.store.read.table_files import rows_in
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError

ROWS_A_FILE = 4096  # rows in a Parquet file of a DistillKit capture
LARGEST = 2**31 - 1  # most bytes of a row: lists in DistillKit's schema have 32-bit offsets
Columns = Sequence[str] | None


@dataclass(frozen=True)
class CaptureExport:
    """Holds the result of an export. `note` is advice for the user."""

    target: str
    format: str
    rows: int
    bytes: int
    note: str = ""

    def line(self) -> str:
        """Describe the result in one line."""
        note = f"; {self.note}" if self.note else ""
        return f"{self.target}: {counted(self.rows, 'row')}, {readable(self.bytes)}{note}"


def export_store(
    path: str, target: Path, kind: str, columns: Columns, floats: str
) -> CaptureExport:
    """Write a store to `target`, which must not exist, in the format `kind` of `EXPORTS`.

    Raises UserError if the store lacks features that the format needs, StoreError for a damaged
    store; then nothing is left at `target`.
    """
    with closing(open_store(path)) as store:
        if kind == "parquet":
            store.to_parquet(target, columns=columns, floats=floats)
            note = ""
        else:
            write: Callable[[Path], str]
            if kind == "datasets":
                write = partial(_datasets, store, store.table(columns, floats))
            elif kind == "sentence-transformers":
                write = partial(_sentences_and_labels, store, _vectors_of(store))
            else:
                write = partial(_distillkit, store, _top_logits_of(store))
            # Record the copy, which has texts of the store, for `forget`; only now, as the export
            # may be refused above. `to_parquet` records its copy itself.
            derived_copies.record_copy(store.source.address, store.manifest, "table", target)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with files.atomic_path(target) as new:
                    new.mkdir()
                    note = write(new)
            except OSError as error:
                raise UserError(f"{target}: cannot be written: {files.reason(error)}") from error
        return CaptureExport(str(target), kind, len(store), _size(target), note)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def _datasets(store: FeatureStore, table: StoreTable, new: Path) -> str:
    import datasets

    datasets.disable_progress_bars()
    # Inside the unfinished folder, so that a failed export leaves no copy of the texts.
    cache = new / ".rows"
    _save(rows_in(cache, table, store.manifest.content()), new)
    shutil.rmtree(cache)
    return "open it with datasets.load_from_disk"


def _save(dataset: Any, folder: Path) -> None:
    dataset.save_to_disk(str(folder))


def _vectors_of(store: FeatureStore) -> EmbeddingSpec:
    """Return the spec of the vectors of texts. Raises UserError if the store has none."""
    vector = store.features.embedding
    if vector is None:
        raise UserError(
            f"{store.path}: holds no text vectors, which trainers of sentence-transformers use as"
            " labels; dump them (teacher-dump --head embedding), or export --to datasets"
        )
    return vector


def _sentences_and_labels(store: FeatureStore, vector: EmbeddingSpec, new: Path) -> str:
    """Write texts and their vectors, for MSELoss of sentence-transformers."""
    import datasets

    datasets.disable_progress_bars()
    cache = new / ".rows"
    dataset = rows_in(cache, store.table(["text", "embedding"]), store.manifest.content())
    dataset = dataset.rename_columns({"text": "sentence", "embedding": "label"})
    note = "columns sentence and label, for MSELoss"
    if prompt := vector.prompt:
        # Texts are written without the prompt, which the trainer puts before each text itself.
        begin = len(prompt)
        dataset = dataset.map(
            lambda rows: {"sentence": [text[begin:] for text in rows["sentence"]]},
            batched=True,
            cache_file_name=str(cache / "bare.arrow"),
        )
        note += f"; texts do not include the prompt: give the trainer prompts={prompt!r}, and"
        note += f" `feature-store import` --prompt {shlex.quote(prompt)}"
    _save(dataset, new)
    shutil.rmtree(cache)
    return note


def _top_logits_of(store: FeatureStore) -> LogitsSpec:
    """Return the spec of the stored logits. Raises UserError unless they are the top K of the next
    token."""
    spec = store.features.logits
    if spec is None or spec.tier != "topk" or not spec.next_token:
        held = f"logits {spec.tier}" if spec else "no logits"
        of = ", of the token itself" if spec and not spec.next_token else ""
        raise UserError(
            f"{store.path}: holds {held}{of}, and DistillKit reads the top-k ids of a causal"
            " teacher's next token; dump a causal teacher with --logits topk:K, or export --to"
            " parquet"
        )
    return spec


def _distillkit(store: FeatureStore, spec: LogitsSpec, new: Path) -> str:
    """Write a capture of DistillKit with all log-probabilities exact, in float32."""
    import pyarrow
    import yaml
    from pyarrow import parquet

    vocabulary = store.features.vocabulary
    bits, settings = index_bits(vocabulary), exact_settings(vocabulary, spec.size)
    (new / SETTINGS).write_text(yaml.safe_dump(settings), "utf-8")
    rows = pyarrow.list_(pyarrow.list_(pyarrow.uint8()))
    # The types of DistillKit's own writer (`compressed_logit_schema` of sample_common.py).
    kinds = {
        "input_ids": pyarrow.list_(pyarrow.uint64()),
        "compressed_logprobs": rows,
        "bytepacked_indices": rows,
    }
    schema = pyarrow.schema(kinds)
    sequences = _token_rows(store)
    for number in range(-(-len(store) // ROWS_A_FILE)):
        with parquet.ParquetWriter(new / f"data_{number}.parquet", schema) as file:
            for token_ids, ids, logprobs in islice(sequences, ROWS_A_FILE):
                if logprobs.size * np.dtype("<f4").itemsize > LARGEST:
                    raise UserError(
                        f"{store.path}: a sequence has {len(token_ids):,} tokens with {spec.size:,}"
                        f" log-probabilities each, and a row of DistillKit holds at most"
                        f" {LARGEST:,} bytes; export --to parquet, or dump with a smaller K or"
                        " --max-length"
                    )
                best = np.ascontiguousarray(logprobs, "<f4").view(np.uint8)
                cells = [
                    pyarrow.array([token_ids.astype(np.uint64)]),
                    _bytes_of_tokens(best),
                    _bytes_of_tokens(packed_ids(ids, bits)),
                ]
                file.write_batch(pyarrow.record_batch(cells, schema=schema))
    deque(sequences, 0)  # read to the end, which reports damage that was found last
    return "a row for each sequence, with log-probabilities for every id"


def _token_rows(store: FeatureStore) -> Iterator[tuple[Array, Array, Array]]:
    """Yield token ids [T], best ids and log-probabilities [T,K] of each sequence, in order. Raises
    StoreError for damage."""
    for batch in store.stream(shuffle=False, check=True, features="logits"):
        assert batch.logits is not None
        for begin, end in pairwise(batch.start.tolist()):
            logits = batch.logits
            yield batch.token_ids[begin:end], logits.ids[begin:end], logits.logprobs[begin:end]


def _bytes_of_tokens(data: Array) -> Any:
    """Convert bytes uint8 [T,B] to the Arrow array of one row, a list of lists."""
    import pyarrow

    tokens, width = data.shape
    # By offsets over one buffer: nested Python lists would have an entry for each byte.
    inner = pyarrow.ListArray.from_arrays(
        np.arange(0, tokens * width + 1, width, dtype=np.int32), data.reshape(-1)
    )
    return pyarrow.ListArray.from_arrays(np.array([0, tokens], np.int32), inner)
