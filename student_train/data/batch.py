"""The batch of a training step: the student's tokens, aligned runs, and the teacher's targets."""

# Hidden states and attention maps stay encoded until they are on the training device, which decodes
# and pools them: a quarter of float32's bytes, or less, is copied there.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from teachonce.store import Batch
from teachonce.store.format.codecs.codec import Elementwise, HiddenCodec
from teachonce.student_train.data.task_targets import TaskTargets
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.student_train.losses.loss import Student
from teachonce.student_train.losses.next_token import ChunkTargets, HeadTargets, TeacherHead
from teachonce.support.arrays import Array, begins, ranges
from teachonce.support.console import counted

NORMALISED = ("normalised", "sentence")  # values of `Loss.teacher`


@dataclass(frozen=True)
class Inputs:
    """Holds padded student input.

    ids: int64 [B,S]. present: bool [B,S], the attention mask. types: int64 [B,S] of 0 or 1, the
    token types of text pairs; None for single texts.
    """

    ids: Tensor
    present: Tensor
    types: Tensor | None = None

    def __repr__(self) -> str:
        """Return only the sizes, as the tensors would fill screens."""
        texts, longest = self.ids.shape
        return f"<Inputs: {counted(texts, 'text')} x {counted(longest, 'student token')}>"

    @classmethod
    def of(cls, ids: Array, start: Array, padding: int, types: Array | None = None) -> Inputs:
        """Pad flat ids [N] and types [N]. `start` [B+1] is the first token of each sequence."""
        lengths = np.diff(start)
        present = np.arange(lengths.max()) < lengths[:, None]
        padded = np.full(present.shape, padding, np.int64)
        padded[present] = ids
        kinds = None
        if types is not None:
            kinds = torch.zeros(present.shape, dtype=torch.int64)
            kinds[torch.from_numpy(present)] = torch.from_numpy(types.astype(np.int64))
        return cls(torch.from_numpy(padded), torch.from_numpy(present), kinds)

    def split(self, texts: int | list[int]) -> list[Inputs]:
        """Split the batch into parts of `texts` texts; the last part may have fewer. If `texts` is
        a list, part i has `texts[i]` texts."""
        ids, present = self.ids.split(texts), self.present.split(texts)
        kinds = [None] * len(ids) if self.types is None else self.types.split(texts)
        return [Inputs(*part) for part in zip(ids, present, kinds, strict=True)]


@dataclass(frozen=True)
class Runs:
    """Holds G runs of flat tokens. Run g has the tokens `member[begin[g]:begin[g + 1]]`."""

    member: Tensor  # int64 [J]
    begin: Tensor  # int64 [G]

    def __repr__(self) -> str:
        tokens = counted(len(self.member), "student token")
        return f"<Runs: {counted(len(self.begin), 'run')} of {tokens}>"

    @classmethod
    def of(cls, runs: Array) -> Runs:
        """Convert half-open runs [G,2] of flat tokens."""
        lengths = (runs[:, 1] - runs[:, 0]).astype(np.int64)
        member = ranges(runs[:, 0].astype(np.int64), lengths)
        return cls(torch.from_numpy(member), torch.from_numpy(begins(lengths)))

    def select(self, keep: Tensor) -> Runs:
        """Return the runs for which `keep`, bool [G], is true."""
        ends = torch.cat([self.begin[1:], self.begin.new_tensor([len(self.member)])])
        lengths = ends - self.begin
        selected = lengths[keep]
        members = self.member[torch.repeat_interleave(keep, lengths)]
        return Runs(members, selected.cumsum(0) - selected)

    def pool(self, values: Tensor, how: str) -> Tensor:
        """Return the sum or mean [G,D] of flat token values [N,D] over each run."""
        # The fastest way in torch to pool ragged runs, forward and backward: index_add takes twice
        # the time, segment_reduce 3 to 4 times, scatter_reduce 6 to 9 times (RESULTS, "Aligning").
        return functional.embedding_bag(self.member, values, self.begin, mode=how)


def pool_members(values: Tensor, begin: Tensor, how: str) -> Tensor:
    """Return the sum or mean [G,D] of values [J,D] over consecutive runs that start at `begin`
    [G]."""
    members = torch.arange(len(values), device=values.device)
    return functional.embedding_bag(members, values, begin, mode=how)


@dataclass(frozen=True)
class MapPooling:
    """Pools attention between tokens into attention between runs: the mean over the query tokens,
    the sum over the key tokens."""

    # With a sum over keys, a row over all runs still adds up to at most 1, as it does over tokens.
    query: Tensor  # float32 [B,G,L]
    key: Tensor  # float32 [B,G,L]
    present: Tensor  # bool [B,G]

    @classmethod
    def of(cls, runs: Array, start: Array) -> MapPooling:
        """Make the pooling for half-open runs [G,2] of flat tokens. `start` [B+1] is the first
        token of each sequence."""
        sequence = np.searchsorted(start, runs[:, 0], side="right") - 1
        counts = np.bincount(sequence, minlength=len(start) - 1)
        position = ranges(np.zeros_like(counts), counts)
        longest = int(np.diff(start).max())
        key = np.zeros((len(start) - 1, max(1, int(counts.max(initial=0))), longest), np.float32)
        lengths = runs[:, 1] - runs[:, 0]
        column = ranges(runs[:, 0] - start[sequence], lengths)
        key[np.repeat(sequence, lengths), np.repeat(position, lengths), column] = 1
        total = key.sum(axis=2, keepdims=True)
        query = key / np.maximum(total, 1)
        return cls(*map(torch.from_numpy, (query, key, total[:, :, 0] > 0)))

    def pool(self, maps: Tensor) -> Tensor:
        """Pool maps [B,L,L] between tokens into maps [B,G,G] between runs."""
        return self.query.to(maps.dtype) @ maps @ self.key.to(maps.dtype).transpose(1, 2)


@dataclass(frozen=True)
class TeacherStates:
    """Holds encoded states of J tokens, to be averaged over G runs.

    stored, mean, deviation, codec: arrays, calibration and codec of a `HiddenBatch`.
    rows: which rows of `stored` are the J tokens; None for all rows, in order.
    """

    stored: dict[str, Tensor]
    mean: Tensor
    deviation: Tensor
    codec: HiddenCodec
    rows: Tensor | None  # int64 [J]
    begin: Tensor  # int64 [G]: where each run begins among the J

    def pooled(self, *, normalised: bool) -> Tensor:
        """Decode the states and average them over each run: float32 [G,D]. If `normalised`, each
        state becomes (state - mean) / deviation first."""
        stored = self.stored
        if self.rows is not None:
            stored = {name: array[self.rows] for name, array in stored.items()}
        decode = self.codec.decode_normalised if normalised else self.codec.decode
        # Always the mean: `--pool` is for the student's outputs only. Under `reduce`, whose default
        # is the sum, a run has one token of the teacher, so that both are equal.
        states = decode(stored, self.mean, self.deviation, torch)
        return pool_members(states, self.begin, "mean")


@dataclass(frozen=True)
class TeacherMaps:
    """Holds encoded attention maps of B texts, to be pooled over their runs."""

    values: dict[str, Tensor]  # flat, by name; a text's map is L^2 entries, row-major
    codec: Elementwise
    begin: Tensor  # int64 [B]: where each map begins
    lengths: Tensor  # int64 [B]
    longest: int
    pooling: MapPooling

    def pooled(self) -> dict[str, Tensor]:
        """Decode and pool the maps: float32 [B,G,G] by name."""
        position = torch.arange(self.longest, device=self.lengths.device)
        inside = position < self.lengths[:, None]
        square = inside[:, :, None] & inside[:, None, :]
        row = self.begin[:, None] + position * self.lengths[:, None]
        # Padding reads entry 0, so that no index leaves the array; its value is dropped below.
        entries = torch.where(square, row[:, :, None] + position, 0)
        return {
            name: self.pooling.pool(self.codec.from_codes(codes[entries], torch).where(square, 0.0))
            for name, codes in self.values.items()
        }


class StreamedFeatures:
    """Copies the encoded states and maps out of a streamed batch; `ResidentFeatures` in `cache.py`
    has them in memory instead."""

    # Only copies leave this class: the stream reuses a batch's arrays for a later batch.
    resident: tuple[str, ...] = ()  # feature groups that need not be streamed

    def states(
        self, batch: Batch, view: int, rows: Array, begin: Tensor
    ) -> dict[str, TeacherStates]:
        """Return, by feature name, the encoded states of the batch's flat tokens `rows` [J], in G
        runs: run g starts at `rows[begin[g]]`."""
        return {
            name: TeacherStates(
                {
                    key: torch.from_numpy(np.take(array, rows, axis=0))
                    for key, array in stored.stored.items()
                },
                torch.from_numpy(stored.mean),
                torch.from_numpy(stored.deviation),
                stored.codec,
                None,
                begin,
            )
            for name, stored in batch.hidden.items()
        }

    def maps(self, batch: Batch, view: int) -> tuple[dict[str, Tensor], Array, Elementwise]:
        """Return the encoded maps of the batch: flat entries by name, the index [B] of the first
        entry of each text's map, and the codec."""
        stored = {name: batch.stored[maps_path(view, name)] for name in batch.attention}
        begin = begins(np.diff(batch.start) ** 2)
        entries = {name: torch.from_numpy(codes.copy()) for name, codes in stored.items()}
        return entries, begin, batch.level.attention


def maps_path(view: int, name: str) -> str:
    """Return the path, within a part, of the attention maps `name` of a view."""
    return f"view{view}/attention/{name}/values"


@dataclass(frozen=True)
class Distillation:
    """Holds the teacher's targets for the G runs of one alignment.

    Runs refer to the student's flat tokens. Targets that no loss of this alignment reads are None
    or left out.

    encoded: the encoded states and maps, by the `Loss.teacher` of the losses that read them; None
        after `StudentBatch.to` has decoded them.
    decoded: the decoded states and maps, float32, by `Loss.teacher`, then by the feature's name:
        pooled states [G,D] for `normalised` and `raw`, states of the first token [B,D] for
        `sentence` and `raw sentence`, attention between runs [B,G',G'] for `maps`, where G' is the
        largest number of runs in a text.
    """

    inputs: Inputs | None  # a second input (reduce); None: the batch's own input
    runs: Runs
    logit_runs: Runs | None  # the runs that have logit targets
    logits: LogitTargets | None
    shared: SharedTargets | None
    map_pooling: MapPooling | None
    task: TaskTargets | None
    encoded: dict[str, dict[str, TeacherStates] | TeacherMaps] | None
    chunks: ChunkTargets | None = None
    inside: Tensor | None = None  # bool [M]: labels that begin inside a token of the teacher
    head: HeadTargets | None = None  # in place of `logits`, if both have the same vocabulary
    decoded: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the number of runs and the targets, as the tensors would fill screens."""
        names = ["logits", "shared", "task", "chunks", "inside", "head"]
        names = [name for name in names if getattr(self, name) is not None]
        names += self.decoded if self.encoded is None else self.encoded
        runs = counted(len(self.runs.begin), "run")
        return f"<Distillation: {runs}; {', '.join(names) or 'no targets'}>"

    @property
    def normalised(self) -> dict[str, Tensor]:
        """Return, by name, the teacher's pooled states [G,D], normalised per channel."""
        return self.decoded.get("normalised", {})

    @property
    def predicted(self) -> LogitTargets | HeadTargets | None:
        """Return the teacher's distributions at `logit_runs`; None if no loss reads them."""
        return self.logits if self.head is None else self.head

    def count_runs(self, side: Student) -> int:
        """Return the number of runs or positions that a loss compares, given its `Loss.student`; 1
        if the loss compares the batch as a whole."""
        of_runs: dict[Student, Runs | ChunkTargets | None] = {
            "runs": self.runs,
            "maps": self.runs,
            "pieces": self.logit_runs,
            "predictions": self.logit_runs,
            "chunks": self.chunks,
        }
        if side not in of_runs:
            return 1
        runs = of_runs[side]
        return len(runs.begin) if runs else 0

    def with_head(self, head: TeacherHead | None) -> Distillation:
        """Return a copy whose `HeadTargets`, if there are any, have this head of the teacher."""
        return replace(self, head=replace(self.head, head=head)) if self.head else self

    def decode(self) -> Distillation:
        """Decode the teacher's states and maps on their device. Decoded targets are unchanged."""
        if self.encoded is None:
            return self
        decoded = {
            side: targets.pooled()
            if isinstance(targets, TeacherMaps)
            else {
                name: states.pooled(normalised=side in NORMALISED)
                for name, states in targets.items()
            }
            for side, targets in self.encoded.items()
        }
        return replace(self, encoded=None, decoded=decoded)


@dataclass(frozen=True)
class StudentBatch:
    """Holds the data of one step.

    masked, labels: flat positions of the masked tokens, and the ids that these tokens had. For a
        decoder: the position before each predicted token, and the predicted token's id.
    tokens: the number of student tokens.
    aligned: the teacher's targets, by the name of each alignment in use.
    vectors: the teacher's text vectors, float32 [B,W].
    unmasked: the input from which the student's text vectors are computed; None if it equals
        `inputs`, or if there are no `vectors`.
    characters, predicted_bytes: the number of characters of the predicted tokens; for a decoder,
        their bytes as well. Only batches of a validation have them; else 0.
    """

    inputs: Inputs
    masked: Tensor  # int64 [M]
    labels: Tensor  # int64 [M]
    tokens: int
    aligned: dict[str, Distillation]
    vectors: Tensor | None = None
    unmasked: Inputs | None = None
    characters: float = 0.0
    predicted_bytes: int = 0

    def __repr__(self) -> str:
        """Return only the sizes, as the tensors would fill screens."""
        texts, aligned = len(self.inputs.ids), ", ".join(self.aligned) or "none"
        tokens, masked = counted(self.tokens, "student token"), f"{len(self.masked):,} predicted"
        return f"<StudentBatch: {counted(texts, 'text')}, {tokens}, {masked}; aligned: {aligned}>"

    @property
    def distillation(self) -> Distillation | None:
        """Return the teacher's targets of the only alignment, or None without an alignment. Raises
        ValueError if there are several."""
        distillations = list(self.aligned.values())
        if len(distillations) > 1:
            raise ValueError(f"the batch is aligned in several ways: {', '.join(self.aligned)}")
        return distillations[0] if distillations else None

    @property
    def of_task(self) -> str | None:
        """Return the name of the first alignment with task targets, or None."""
        return next((n for n, targets in self.aligned.items() if targets.task is not None), None)

    def with_head(self, head: TeacherHead | None) -> StudentBatch:
        """Return a copy whose `HeadTargets` have `head` as the teacher's head.

        Batches are sent between processes with `head=None`: a head has as many numbers as hundreds
        of batches.
        """
        aligned = {name: targets.with_head(head) for name, targets in self.aligned.items()}
        return replace(self, aligned=aligned)

    def masked_lm(self) -> dict[str, Tensor]:
        """Return the arguments of a transformers masked-LM model, for its Trainer: `input_ids`,
        `attention_mask` and `labels` int64 [B,S] (-100 at unmasked tokens), and for text pairs
        `token_type_ids`."""
        present = self.inputs.present
        flat = torch.full((int(present.sum()),), -100, device=self.labels.device)
        flat[self.masked] = self.labels
        labels = torch.full(present.shape, -100, device=flat.device)
        labels[present] = flat
        args = {
            "input_ids": self.inputs.ids,
            "attention_mask": present.long(),
            "labels": labels,
        }
        return args if self.inputs.types is None else args | {"token_type_ids": self.inputs.types}

    def to(self, device: torch.device | str | int) -> StudentBatch:
        """Move the batch to a device, such as `cuda:0`, and decode the teacher's states and maps
        there."""
        moved: StudentBatch = _moved(self, torch.device(device))
        return replace(moved, aligned={n: t.decode() for n, t in moved.aligned.items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            value = value.pin_memory()  # a copy from pageable memory would block this thread
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    # A `TeacherHead` is not a dataclass and passes as it is: it moves itself when it is used.
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{key: _moved(item, device) for key, item in vars(value).items()})
    return value
