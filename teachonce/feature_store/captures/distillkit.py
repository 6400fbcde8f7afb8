"""Read captures of DistillKit: Parquet or a folder of `datasets`, with top-k log-probabilities.

After distillkit/sample_logits_vllm.py, sample_common.py and pack_logits.py of
github.com/arcee-ai/DistillKit, commit a61c2e7. A row is a text: `input_ids`, and for each token the
log-probabilities of the next token. Some serving engines omit the log-probabilities of the last id.
In packed rows `attention_mask` numbers the texts from 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.compressed_logprobs import (
    Compression,
    LegacyCompression,
    index_bits,
    legacy_logprobs_of,
    logprobs_of,
    read_settings,
    unpacked_ids,
    words_of_ids,
)
from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample, same_length
from teachonce.feature_store.captures.schema import OTHER, Numbers
from teachonce.feature_store.captures.tables import Table, first_width, numbers, open_table
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError

SETTINGS = "compression_config.yaml"
IDS = Numbers("input_ids", "ids", ("tokens",))
MASK = Numbers("attention_mask", "ids", ("tokens",))  # numbers the texts of a packed row
NEW = (
    Numbers("compressed_logprobs", "bytes", ("tokens", "bytes")),
    Numbers("bytepacked_indices", "bytes", ("tokens", "bytes of ids")),
)
LEGACY = (
    Numbers("packed_indices", "words", ("tokens", "words")),
    Numbers("exact_values", "floats", ("tokens", "exact values")),
    Numbers("coeffs", "doubles", ("tokens", "coefficients")),
)
PLAIN = (
    Numbers("token_ids", "ids", ("tokens", "top-k ids")),
    Numbers("top_values", "logs", ("tokens", "top-k ids")),
)
Layout = tuple[Numbers, ...]

Cells = Mapping[str, Any]
Decode = Callable[[Cells, str, slice], tuple[Array, Floats]]


def layout_of(columns: tuple[str, ...]) -> Layout | None:
    """Return the columns that hold the logits, or None if the columns are not DistillKit's."""
    if IDS.name not in columns:
        return None
    layouts: tuple[Layout, ...] = (NEW, LEGACY, PLAIN)
    return next((each for each in layouts if _names(each) <= set(columns)), None)


def _names(layout: Layout) -> set[str]:
    return {field.name for field in layout}


def recognises(path: Path) -> bool:
    """Return whether a path holds a capture of DistillKit."""
    table = open_table(path)
    return table is not None and layout_of(table.columns) is not None


class DistillKit:
    """Reads a capture of DistillKit."""

    def __init__(self, options: ImportOptions, teacher: TeacherFiles) -> None:
        table = open_table(options.source)
        layout = layout_of(table.columns) if table else None
        if table is None or layout is None:
            raise UserError(
                f"{options.source}: no table with input_ids and logits of DistillKit"
                f" ({', '.join(each.name for each in NEW)}); its columns are"
                f" {', '.join(table.columns) if table else 'none'}: check the path and --format"
            )
        self._table: Table = table
        self._layout = layout
        self._mask = [MASK.name] if MASK.name in table.columns else []
        self._compression: Compression | LegacyCompression | None = None
        if layout is not PLAIN:
            self._compression = self._settings(options)
        k = self._compression.k if self._compression else first_width(table, PLAIN[0])
        vocabulary = self._compression.d if self._compression else 0
        self.contents = CaptureContents(topk=k, vocabulary=max(vocabulary, teacher.vocabulary))
        self.settings: dict[str, Any] = {}
        if self._compression:  # the same files give other numbers under other settings
            digest = hashlib.sha256(repr(self._compression).encode()).hexdigest()
            self.settings["compression"] = digest

    def _settings(self, options: ImportOptions) -> Compression | LegacyCompression:
        folder = options.source if options.source.is_dir() else options.source.parent
        path = options.compression or folder / SETTINGS
        if not path.is_file():
            raise UserError(
                f"{options.source}: there is no {SETTINGS} in its folder, and logits cannot be"
                " decompressed without it; give it by --compression, or the settings of a training"
                " that reads the capture"
            )
        found = read_settings(path)
        if isinstance(found, LegacyCompression) != (self._layout is LEGACY):
            columns = ", ".join(each.name for each in self._layout)
            raise UserError(
                f"{path}: describes another compression than the columns {columns} have; give the"
                " settings of this capture by --compression"
            )
        return found

    def files(self) -> list[Path]:
        """Return the files of the table."""
        return list(self._table.files)

    def samples(self) -> Iterator[Sample]:
        """Yield the texts of all rows. A packed row holds several texts."""
        decode: Decode = {NEW: self._new, LEGACY: self._legacy, PLAIN: self._plain}[self._layout]
        names = [field.name for field in self._layout]
        for where, cells in self._table.rows([IDS.name, *self._mask, *names]):
            ids = numbers(IDS, cells[IDS.name], where)
            for begin, end in self._texts(ids, cells, where):
                span = slice(begin, end)
                yield Sample(where, partial(_rows, decode, cells, where, span), ids[span])

    def _texts(self, ids: Array, cells: Cells, where: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each text in a row."""
        rows = getattr(cells[self._layout[0].name], "values", None)
        count = 0 if rows is None else len(rows)
        if len(ids) == count + 1:  # the last id has no logits
            ids = ids[:-1]
        same_length(ids, count, "logits", where)
        if not count:
            raise UserError(f"{where}: holds no token with logits; remove this row")
        mask = np.ones(count, np.int64)
        if self._mask and cells[MASK.name].is_valid:
            mask = numbers(MASK, cells[MASK.name], where)[:count]
            same_length(ids, len(mask), "an attention_mask", where)
        # The numbers before and behind are unlike their neighbours, so that both ends count as
        # edges.
        edges = np.flatnonzero(np.diff(mask, prepend=mask[:1] - 1, append=mask[-1:] - 1))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            # 0 is padding, as in masks of transformers.
            if mask[begin]:
                yield begin, end

    def _new(self, cells: Cells, where: str, span: slice) -> tuple[Array, Floats]:
        assert isinstance(self._compression, Compression)
        data, packed = self._rows_of(cells, where, span)
        settings = self._compression
        expected = settings.width, -(-settings.k * settings.id_bits // 8)
        if (data.shape[1], packed.shape[1]) != expected:
            raise UserError(
                f"{where}: {data.shape[1]} bytes of log-probabilities and {packed.shape[1]} of ids"
                f" a token, and the settings of compression make {expected[0]} and {expected[1]};"
                " give the settings of this capture (--compression)"
            )
        ids = unpacked_ids(packed, settings.id_bits, settings.k)
        return ids, logprobs_of(data, settings)

    def _legacy(self, cells: Cells, where: str, span: slice) -> tuple[Array, Floats]:
        assert isinstance(self._compression, LegacyCompression)
        packed, exact, terms = self._rows_of(cells, where, span)
        settings = self._compression
        bits = index_bits(settings.d)
        expected = -(-settings.k // (64 // bits)), settings.exact_k
        tail = settings.polynomial_degree + 1 + settings.with_sqrt_term
        if settings.k == settings.exact_k:
            tail = 0
        if (packed.shape[1], exact.shape[1], terms.shape[1]) != (*expected, tail):
            names = ", ".join(each.name for each in LEGACY)
            raise UserError(
                f"{where}: {packed.shape[1]}, {exact.shape[1]} and {terms.shape[1]} values a token"
                f" in {names}, and the settings of compression make {expected[0]}, {expected[1]}"
                f" and {tail}; give the settings of this capture (--compression)"
            )
        ids = words_of_ids(packed.astype(np.int64), bits, settings.k)
        return ids, legacy_logprobs_of(exact, terms, settings)

    def _plain(self, cells: Cells, where: str, span: slice) -> tuple[Array, Floats]:
        ids, values = self._rows_of(cells, where, span)
        if ids.shape != values.shape:
            raise UserError(
                f"{where}: ids {list(ids.shape)} and values {list(values.shape)}, expected equal"
                " shapes; remove this row"
            )
        if self.contents.topk is not None and ids.shape[1] > self.contents.topk:
            raise UserError(
                f"{where}: has {ids.shape[1]:,} ids for a token, and the first row"
                f" {self.contents.topk:,}; remove this row"
            )
        return ids, values

    def _rows_of(self, cells: Cells, where: str, span: slice) -> list[Array]:
        """Return the arrays of a text's tokens. Raises UserError if the columns of the row differ
        in length."""
        found = [numbers(field, cells[field.name], where) for field in self._layout]
        for field, array in zip(self._layout, found, strict=True):
            if len(array) != len(found[0]):
                raise UserError(
                    f"{where}: {self._layout[0].name} has {len(found[0]):,} tokens, and"
                    f" {field.name} {len(array):,}; {OTHER}"
                )
        return [array[span] for array in found]


def _rows(decode: Decode, cells: Cells, where: str, span: slice) -> Rows:
    return Rows(topk=decode(cells, where, span))


FORMAT = Format("distillkit", recognises, DistillKit, frozenset({"model", "compression"}))
