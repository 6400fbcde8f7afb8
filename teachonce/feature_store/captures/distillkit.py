"""Read captures of DistillKit: Parquet or a folder of `datasets`, with top-k log-probabilities.

After distillkit/sample_logits_vllm.py, sample_common.py and pack_logits.py of
github.com/arcee-ai/DistillKit, commit a61c2e7. A row is a text: `input_ids`, and for each token the
log-probabilities of the next token. Some serving engines omit the log-probabilities of the last id.
In packed rows `attention_mask` numbers the texts from 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from teachonce.feature_store.captures.compressed_logprobs import (
    Compression,
    LegacyCompression,
    read_compression,
)
from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample, same_length
from teachonce.feature_store.captures.schema import Numbers
from teachonce.feature_store.captures.tables import (
    Cells,
    TableCapture,
    TableFiles,
    first_width,
    holds_table,
    numbers,
    row_arrays,
)
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.arrays import Array
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
    Numbers("exact_values", "floats", ("tokens", "exact values"), may_be_empty=True),
    Numbers("coeffs", "doubles", ("tokens", "coefficients"), may_be_empty=True),
)
PLAIN = (
    Numbers("token_ids", "ids", ("tokens", "top-k ids")),
    Numbers("top_values", "logs", ("tokens", "top-k ids")),
)
Layout = tuple[Numbers, ...]


def _layout_of(table: TableFiles) -> Layout | None:
    """Return the columns that hold the logits, or None if the columns are not DistillKit's."""
    layouts: tuple[Layout, ...] = (NEW, LEGACY, PLAIN)
    names = set(table.columns)
    fitting = (layout for layout in layouts if {IDS.name, *_names(layout)} <= names)
    return next(fitting, None)


def _names(layout: Layout) -> list[str]:
    return [field.name for field in layout]


class DistillKit(TableCapture):
    def __init__(self, options: ImportOptions, teacher: TeacherFiles) -> None:
        expected = f"table with input_ids and logits of DistillKit ({', '.join(_names(NEW))})"
        super().__init__(options.source, _layout_of, expected)
        layout = _layout_of(self._table)
        assert layout is not None
        self._layout = layout
        self._mask = [MASK.name] if MASK.name in self._table.columns else []
        self._compression = None if self._layout is PLAIN else self._settings(options)
        if self._compression is None:
            k, vocabulary = first_width(self._table, PLAIN[0]), 0
        else:
            k, vocabulary = self._compression.k, self._compression.d
            # Part of the store's identity: with other settings, the same files decode to other
            # numbers.
            digest = hashlib.sha256(repr(self._compression).encode()).hexdigest()
            self.settings = {"compression": digest}
        # Top-k ids are below `d` of the compression, and ids of the text are below the tokenizer's
        # vocabulary: the larger size holds both.
        self.contents = CaptureContents(topk=k, vocabulary=max(vocabulary, teacher.vocabulary))

    def _settings(self, options: ImportOptions) -> Compression | LegacyCompression:
        folder = options.source if options.source.is_dir() else options.source.parent
        path = options.compression or folder / SETTINGS
        if not path.is_file():
            raise UserError(
                f"{options.source}: its folder has no {SETTINGS}, without which logits cannot be"
                " decompressed; give this file with --compression, or the settings of a training"
                " that reads the capture"
            )
        settings = read_compression(path)
        if isinstance(settings, LegacyCompression) != (self._layout is LEGACY):
            raise UserError(
                f"{path}: describes another compression than the columns"
                f" {', '.join(_names(self._layout))} have; give the settings of this capture with"
                " --compression"
            )
        return settings

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for each text. A packed row holds several texts."""
        for where, cells in self._table.rows([IDS.name, *self._mask, *_names(self._layout)]):
            ids = numbers(IDS, cells, where)
            for begin, end in self._texts(ids, cells, where):
                span = slice(begin, end)
                yield Sample(where, partial(self._rows, cells, where, span), ids[span])

    def _texts(self, ids: Array, cells: Cells, where: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each text in a row."""
        rows = getattr(cells[self._layout[0].name], "values", None)
        count = 0 if rows is None else len(rows)
        mask = np.ones(count, np.int64)
        if self._mask and cells[MASK.name].is_valid:
            mask = numbers(MASK, cells, where)
        # The last id may have no logits.
        ids, mask = (values[:-1] if len(values) == count + 1 else values for values in (ids, mask))
        same_length(ids, count, "logits", where)
        same_length(ids, len(mask), "an attention_mask", where)
        if not count:
            raise UserError(f"{where}: holds no token with logits; remove this row")
        # `prepend` and `append` differ from their neighbours, so that both ends count as edges.
        edges = np.flatnonzero(np.diff(mask, prepend=mask[:1] - 1, append=mask[-1:] - 1))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            # 0 is padding, as in masks of transformers.
            if mask[begin]:
                yield begin, end

    def _rows(self, cells: Cells, where: str, span: slice) -> Rows:
        arrays = [array[span] for array in row_arrays(self._layout, cells, where).values()]
        settings, widths = self._compression, [array.shape[1] for array in arrays]
        if settings is None:
            if widths[0] > (self.contents.topk or 0):
                raise UserError(
                    f"{where}: has {widths[0]:,} ids for a token, and the first row"
                    f" {self.contents.topk:,}; remove this row"
                )
            return Rows(topk=(arrays[0], arrays[1]))
        if widths != settings.widths:
            got, expected = (" and ".join(map(str, sizes)) for sizes in (widths, settings.widths))
            raise UserError(
                f"{where}: a token has {got} values in {', '.join(_names(self._layout))}, and"
                f" {expected} by the settings of compression; give the settings of this capture"
                " (--compression)"
            )
        return Rows(topk=settings.decode(*arrays))


FORMAT = Format(
    "distillkit", partial(holds_table, _layout_of), DistillKit, frozenset({"model", "compression"})
)
