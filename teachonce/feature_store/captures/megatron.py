"""Read archives of Megatron-LM: tars of the top-k log-probabilities of a training run.

After megatron/training/distillation of github.com/NVIDIA/Megatron-LM, commit d98e8a6. An archive
`cp<C>_dp<D>__<I>.tar` holds for each iteration the microbatches of one rank: values [S,B,K], and
ids of 17 bits. It holds no tokens: the file of --tokens has them, in the order in which the
training read them.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import numbered, regular, unzstd
from teachonce.feature_store.captures.formats import Format, ImportOptions
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample
from teachonce.feature_store.captures.schema import Numbers, checked
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.feature_store.captures.tensors import load_tensors
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError, first_line
from teachonce.support.parsing import schema_violation, whole_number

ARCHIVE = re.compile(r"cp(\d+)_dp(\d+)__(\d+)\.tar")
META = "_meta.json"
PAYLOAD = re.compile(r"(\d+)\.pt\.zst")
# Megatron-LM writes -1000 for ids outside the nucleus (top-p), other releases -10,000.
EMPTY = -999.0
ARCHIVE_END = bytes(512)  # an empty header; tarfile accepts an archive without this end marker


DIMS = ("tokens", "sequences", "top-k ids")
# Megatron-LM splits an id of 17 bits to save bytes: 16 bits, and the highest by itself.
FIELDS = (
    Numbers("values", "logs", DIMS),
    Numbers("indices_low", "low", DIMS),
    Numbers("bit_17", "bits", DIMS),
)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Holds values float32 [S,B,K] and ids int32 [S,B,K] of a microbatch."""

    values: Floats
    ids: Array

    def rows(self, row: int, span: slice) -> Rows:
        """Return ids int64 and log-probabilities float32 of the tokens `span` of sequence `row`."""
        values = self.values[span, row]
        ids = self.ids[span, row].astype(np.int64)
        return Rows(topk=(ids, np.where(values < EMPTY, -np.inf, values)))


class Megatron:
    """Reads the archives of a training run of Megatron-LM."""

    def __init__(self, options: ImportOptions, teacher: TeacherFiles) -> None:
        self._source = options.source
        if options.source.is_file():
            raise UserError(
                f"{options.source}: is a file, expected the folder with all archives of the run;"
                f" give {options.source.parent}"
            )
        self._files = regular(_archives(options.source))
        if not self._files:
            raise UserError(
                f"{options.source}: there is no archive such as cp0_dp0__99.tar in it;"
                " check the path"
            )
        ranks = set(map(_rank, self._files))
        self._context, self._data = (1 + max(rank[i] for rank in ranks) for i in (0, 1))
        if lost := self._context * self._data - len(ranks):
            raise UserError(
                f"{options.source}: archives of {lost} of {self._context * self._data} ranks are"
                " missing (every cp with every dp); copy all of them"
            )
        # Refused before reading: an id above 17 bits would silently be another id.
        if teacher.vocabulary > 1 << 17:
            raise UserError(
                f"{options.source}: archives of Megatron-LM store token ids in 17 bits, but the"
                f" vocabulary of --tokenizer has {teacher.vocabulary:,} pieces: ids above"
                f" {(1 << 17) - 1:,} are lost; capture this teacher with another tool"
            )
        self._tokens_file, self._tokens = _tokens(options)
        self._end = teacher.tokenizer.eos_token_id
        self._most = self._k_of_run()
        self.contents = CaptureContents(topk=self._most, vocabulary=teacher.vocabulary)
        self.settings: dict[str, Any] = {"end": self._end}  # texts are cut at this token

    def _k_of_run(self) -> int:
        """Return K, the number of ids for a token, from the first archive."""
        path = self._files[0]
        name, data = next(_members(path), ("", b""))
        if name != META:
            raise UserError(
                f"{path}: does not begin with {META}; it is not an archive of Megatron-LM"
            )
        try:
            meta = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: its {META} is not JSON ({first_line(error)}); copy the archive again"
            ) from None
        # An id has 17 bits, so a token has at most 2**17 of them.
        if schema_violation(meta, {"saver": {"k": int}}) or not 0 < meta["saver"]["k"] <= 1 << 17:
            raise UserError(f"{path}: its {META} has no valid k; copy the archive again")
        return int(meta["saver"]["k"])

    def files(self) -> list[Path]:
        """Return the archives, and the file of the tokens."""
        return [*self._files, self._tokens_file]

    def samples(self) -> Iterator[Sample]:
        """Yield the texts of all sequences, rank by rank, in the order of iterations.

        The end-of-text token and its row are left out.
        """
        for rank in range(self._data):
            for iteration, batches in self._iterations(rank):
                for number, batch in enumerate(batches):
                    yield from self._of_batch(rank, iteration, len(batches), number, batch)

    def _of_batch(
        self, rank: int, iteration: int, count: int, number: int, batch: Microbatch
    ) -> Iterator[Sample]:
        length, size = batch.values.shape[:2]
        # A global batch is dealt out microbatch by microbatch, to each data rank in turn.
        first = ((iteration * count + number) * self._data + rank) * size
        for row in range(size):
            where = f"{self._source}, iteration {iteration}, sequence {first + row} of the run"
            if first + row >= len(self._tokens):
                raise UserError(
                    f"{where}: is beyond the {len(self._tokens):,} sequences of"
                    f" {self._tokens_file}; give the tokens of the whole run, in the order in which"
                    " it read them"
                )
            if self._tokens.shape[1] not in (length, length + 1):
                raise UserError(
                    f"{where}: has {length:,} tokens, and each sequence of {self._tokens_file}"
                    f" {self._tokens.shape[1]:,}; give the tokens of this run"
                )
            ids = np.asarray(self._tokens[first + row, :length], np.int64)
            # Only the first text may be the rest of a text that began in the previous sequence.
            for begin, end in _texts(ids, self._end):
                rows = partial(batch.rows, row, slice(begin, end))
                yield Sample(where, rows, ids[begin:end], continues=begin == 0)

    def _iterations(self, rank: int) -> Iterator[tuple[int, list[Microbatch]]]:
        """Yield the iterations of a data-parallel rank, merged over its context-parallel ranks."""
        # zip would end with the shortest rank, and drop the iterations of the others in silence.
        for parts in zip_longest(*(self._of_rank(c, rank) for c in range(self._context))):
            iterations = {(part[0], len(part[1])) if part else None for part in parts}
            if len(iterations) > 1:
                raise UserError(
                    f"{self._source}: the context ranks of data rank {rank} hold different"
                    " iterations; copy all archives of the run"
                )
            every = list(zip(*(batches for _, batches in parts), strict=True))
            if any(len({part.values.shape[:2] for part in group}) > 1 for group in every):
                raise UserError(
                    f"{self._source}, iteration {parts[0][0]}: the context ranks of data rank"
                    f" {rank} hold microbatches of different sizes; copy all archives of the run"
                )
            yield parts[0][0], [merge_context_ranks(list(group)) for group in every]

    def _of_rank(self, context: int, rank: int) -> Iterator[tuple[int, list[Microbatch]]]:
        for path in self._files:
            if _rank(path) != (context, rank):
                continue
            for name, data in _members(path):
                if match := PAYLOAD.fullmatch(name):
                    where = f"{path}, {name:.40}"
                    if (iteration := whole_number(match[1])) is None:
                        raise UserError(
                            f"{where}: expected the number of an iteration as its name; copy the"
                            " archive again"
                        )
                    batches = _microbatches(unzstd(data, where), where)
                    for number, batch in enumerate(batches):
                        # Fewer ids are no error: with a nucleus (top-p), Megatron-LM stores the
                        # number of ids of the largest nucleus in the microbatch.
                        if (size := batch.values.shape[2]) > self._most:
                            raise UserError(
                                f"{where}, microbatch {number}: has {size:,} ids for a token, and"
                                f" {META} of the run {self._most:,}; copy the archives again"
                            )
                    yield iteration, batches


def _archives(folder: Path) -> list[Path]:
    return numbered(path for path in folder.glob("*.tar") if ARCHIVE.fullmatch(path.name))


def _rank(path: Path) -> tuple[int, int]:
    """Return the context-parallel rank and the data-parallel rank that wrote an archive."""
    match = ARCHIVE.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of an archive, in its order."""
    try:
        # "r:" refuses compressed archives, which could unpack to any size.
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                # The holes of a sparse member take no bytes, so it may unpack to any size, too.
                if member.isreg() and not member.issparse():
                    inner = archive.extractfile(member)
                    data = inner.read() if inner else b""
                    if len(data) < member.size:
                        raise UserError(f"{path}: {member.name} in it is truncated; copy it again")
                    yield member.name, data
            file.seek(archive.offset)  # after the last member, where the end marker must be
            if file.read(len(ARCHIVE_END)) != ARCHIVE_END:
                raise UserError(
                    f"{path}: has no end, because it was truncated, or is damaged after byte"
                    f" {archive.offset:,}; copy it again"
                )
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); copy it again") from None


def _microbatches(data: bytes, where: str) -> list[Microbatch]:
    payload = load_tensors(data, where)
    lists = [payload.get(field.name) for field in FIELDS]
    counts = {len(values) if isinstance(values, list) else 0 for values in lists}
    if len(counts) > 1 or not max(counts):
        raise UserError(
            f"{where}: expected {', '.join(field.name for field in FIELDS)}, a list of tensors"
            f" [{', '.join(DIMS)}] each, all of the same length; this is not a payload of"
            " Megatron-LM"
        )
    microbatches = []
    for number, tensors in enumerate(zip(*(values for values in lists if values), strict=True)):
        named = {field.name: one for field, one in zip(FIELDS, tensors, strict=True)}
        arrays = checked(FIELDS, named, f"{where}, microbatch {number}")
        ids = arrays["indices_low"] | arrays["bit_17"] << 16
        microbatches.append(Microbatch(arrays["values"], ids))
    return microbatches


def merge_context_ranks(parts: list[Microbatch]) -> Microbatch:
    """Concatenate the chunks of sequences that context-parallel ranks divided: rank r of C has
    chunks r and 2C-1-r of 2C."""
    if len(parts) == 1:
        return parts[0]
    # With a nucleus, ranks may have different numbers of ids: missing ids are padded as empty.
    most = max(part.values.shape[2] for part in parts)
    values: list[Any] = [None] * (2 * len(parts))
    ids = list(values)
    for rank, part in enumerate(parts):
        room = ((0, 0), (0, 0), (0, most - part.values.shape[2]))
        halves = np.array_split(np.pad(part.values, room, constant_values=-1000.0), 2)
        values[rank], values[-1 - rank] = halves
        ids[rank], ids[-1 - rank] = np.array_split(np.pad(part.ids, room), 2)
    return Microbatch(np.concatenate(values), np.concatenate(ids))


def _tokens(options: ImportOptions) -> tuple[Path, Array]:
    """Return the file of --tokens, and its ids [sequences, tokens]."""
    if options.tokens is None:
        raise UserError(
            f"{options.source}: archives of Megatron-LM hold no tokens; give the tokens of the run"
            " as --tokens FILE.npy: whole numbers [sequences, tokens], in the order in which they"
            " were read"
        )
    regular([options.tokens])
    try:
        # Mapped, as the tokens of a whole run need not fit into memory. Not by np.load, which
        # advises to load a text file as a pickle.
        ids = np.lib.format.open_memmap(options.tokens, mode="r")
    except Exception as error:  # NumPy reads the header as an expression of Python
        raise UserError(
            f"--tokens {options.tokens}: cannot be read ({first_line(error)}); check the path,"
            " and give a .npy file that numpy.save wrote"
        ) from None
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(
            f"--tokens {options.tokens}: is {ids.dtype}{list(ids.shape)}, expected whole"
            " numbers [sequences, tokens]; save the tokens of the run with this shape"
        )
    return options.tokens, np.asarray(ids)


def _texts(ids: Array, end: int | None) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each text in a sequence; the token `end` divides texts."""
    positions = np.flatnonzero(ids == end) if end is not None else np.zeros(0, np.int64)
    begin = 0
    for position in (*positions.tolist(), len(ids)):
        if position > begin:
            yield begin, position
        begin = position + 1


FORMAT = Format(
    "megatron",
    lambda path: bool(_archives(path) or ARCHIVE.fullmatch(path.name)),
    Megatron,
    frozenset({"model", "tokens"}),
)
