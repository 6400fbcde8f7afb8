"""The batch of a training step: tokens as the student reads them, runs of tokens, and the teacher's
targets. States and maps stay as the store encodes them until the device that trains decodes and
pools them, so a quarter of float32's bytes or less is copied there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from teachonce.store import Batch
from teachonce.store.format.codecs.codec import Elementwise, HiddenCodec
from teachonce.student_train.data.targets import TaskTargets
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.support.arrays import Array, begins, ranges


@dataclass(frozen=True)
class Inputs:
    """Holds padded student input: ids [B,S], where there is a token [B,S], and of pairs of texts
    which one it is of [B,S], 0 or 1 as the student's tokenizer tells."""

    ids: Tensor
    present: Tensor
    types: Tensor | None = None

    @classmethod
    def of(cls, ids: Array, start: Array, padding: int, types: Array | None = None) -> Inputs:
        """Pad flat ids [N], and types [N], of sequences that begin at `start` [B+1]."""
        lengths = np.diff(start)
        present = np.arange(lengths.max()) < lengths[:, None]
        padded = np.full(present.shape, padding, np.int64)
        padded[present] = ids
        kinds = None
        if types is not None:
            kinds = torch.zeros(present.shape, dtype=torch.int64)
            kinds[torch.from_numpy(present)] = torch.from_numpy(types.astype(np.int64))
        return cls(torch.from_numpy(padded), torch.from_numpy(present), kinds)

    def split(self, texts: int) -> list[Inputs]:
        """Split the batch into parts of so many texts; the last may have fewer."""
        ids, present = self.ids.split(texts), self.present.split(texts)
        kinds = [None] * len(ids) if self.types is None else self.types.split(texts)
        return [Inputs(*part) for part in zip(ids, present, kinds, strict=True)]


@dataclass(frozen=True)
class Runs:
    """Holds G runs of flat tokens. Run g has the tokens `member[begin[g]:begin[g + 1]]`."""

    member: Tensor  # int64 [J]
    begin: Tensor  # int64 [G]

    @classmethod
    def of(cls, runs: Array) -> Runs:
        """Make runs of half-open runs [G,2]."""
        lengths = (runs[:, 1] - runs[:, 0]).astype(np.int64)
        member = ranges(runs[:, 0].astype(np.int64), lengths)
        return cls(torch.from_numpy(member), torch.from_numpy(begins(lengths)))

    def chosen(self, where: Tensor) -> Runs:
        """Keep the runs at which bool [G] is true."""
        ends = torch.cat([self.begin[1:], self.begin.new_tensor([len(self.member)])])
        lengths = ends - self.begin
        kept = lengths[where]
        return Runs(self.member[torch.repeat_interleave(where, lengths)], kept.cumsum(0) - kept)

    def pool(self, values: Tensor, how: str) -> Tensor:
        """Take the sum or mean [G,D] of flat token values [N,D] over each run.

        Of the ways that torch has, `embedding_bag` is the fastest, forward and backward.
        """
        return functional.embedding_bag(self.member, values, self.begin, mode=how)

    def pool_members(self, values: Tensor, how: str) -> Tensor:
        """Take the sum or mean [G,D] over each run of values [J,D] of the members alone, in their
        order."""
        return pool_members(values, self.begin, how)


def pool_members(values: Tensor, begin: Tensor, how: str) -> Tensor:
    """Take the sum or mean [G,D] of values [J,D] over G runs, which follow one another from `begin`
    [G]."""
    members = torch.arange(len(values), device=values.device)
    return functional.embedding_bag(members, values, begin, mode=how)


@dataclass(frozen=True)
class MapPooling:
    """Turns attention between tokens into attention between runs: mean over the asking tokens, sum
    over the attended ones.

    Then a row over all runs still holds at most the probability of the row over all tokens.
    """

    asking: Tensor  # float32 [B,G,L]
    attended: Tensor  # float32 [B,G,L]
    present: Tensor  # bool [B,G]

    @classmethod
    def of(cls, runs: Array, start: Array) -> MapPooling:
        """Make the pooling of half-open runs [G,2] of flat tokens whose sequences begin at `start`
        [B+1]."""
        sequence = np.searchsorted(start, runs[:, 0], side="right") - 1
        counts = np.bincount(sequence, minlength=len(start) - 1)
        place = ranges(np.zeros_like(counts), counts)
        longest = int(np.diff(start).max())
        attended = np.zeros(
            (len(start) - 1, max(1, int(counts.max(initial=0))), longest), np.float32
        )
        lengths = runs[:, 1] - runs[:, 0]
        column = ranges(runs[:, 0] - start[sequence], lengths)
        attended[np.repeat(sequence, lengths), np.repeat(place, lengths), column] = 1
        total = attended.sum(axis=2, keepdims=True)
        asking = attended / np.maximum(total, 1)
        return cls(*map(torch.from_numpy, (asking, attended, total[:, :, 0] > 0)))

    def pool(self, maps: Tensor) -> Tensor:
        """Turn maps [B,L,L] between tokens into maps [B,G,G] between runs."""
        return self.asking.to(maps.dtype) @ maps @ self.attended.to(maps.dtype).transpose(1, 2)


@dataclass(frozen=True)
class TeacherStates:
    """Holds stored states of J tokens, to be averaged over G runs of them. Where `rows` is None,
    the J tokens are all of `stored`.

    Arrays, calibration and codec are those of a `HiddenBatch`.
    """

    stored: dict[str, Tensor]
    mean: Tensor
    deviation: Tensor
    codec: HiddenCodec
    rows: Tensor | None  # int64 [J] of the stored arrays
    begin: Tensor  # int64 [G]: where runs begin among the J

    def normalised(self) -> Tensor:
        """Decode and pool (state - mean) / deviation: float32 [G,D]."""
        states = self.codec.decode_normalised(self._rows(), self.mean, self.deviation, torch)
        return self._pooled(states)

    def states(self) -> Tensor:
        """Decode and pool raw states: float32 [G,D]."""
        return self._pooled(self.codec.decode(self._rows(), self.mean, self.deviation, torch))

    def _rows(self) -> dict[str, Tensor]:
        if self.rows is None:
            return self.stored
        return {name: array[self.rows] for name, array in self.stored.items()}

    def _pooled(self, states: Tensor) -> Tensor:
        return pool_members(states, self.begin, "mean")


@dataclass(frozen=True)
class TeacherMaps:
    """Holds stored maps between the tokens of B texts, to be pooled over their runs."""

    values: dict[str, Tensor]  # flat, by name; a text's map is L^2 entries, row-major
    codec: Elementwise
    begin: Tensor  # int64 [B] where they begin
    lengths: Tensor  # int64 [B]
    longest: int
    pooling: MapPooling

    def pooled(self) -> dict[str, Tensor]:
        """Decode and pool attention between runs: float32 [B,G,G] by name."""
        place = torch.arange(self.longest, device=self.lengths.device)
        inside = place < self.lengths[:, None]
        square = inside[:, :, None] & inside[:, None, :]
        row = self.begin[:, None] + place * self.lengths[:, None]
        entries = torch.where(square, row[:, :, None] + place, 0)
        return {
            name: self.pooling.pool(self.codec.from_codes(codes[entries], torch).where(square, 0.0))
            for name, codes in self.values.items()
        }


@dataclass(frozen=True)
class Encoded:
    """Holds the targets of a `Distillation` that the device decodes, by the names of features."""

    normalised: dict[str, TeacherStates]
    states: dict[str, TeacherStates]
    sentences: dict[str, TeacherStates]
    raw_sentences: dict[str, TeacherStates]
    maps: TeacherMaps | None

    def decoded(self) -> dict[str, Any]:
        """Decode everything: the values of `Distillation`'s fields by their names."""
        return {
            "normalised": {name: it.normalised() for name, it in self.normalised.items()},
            "states": {name: it.states() for name, it in self.states.items()},
            "sentences": {name: it.normalised() for name, it in self.sentences.items()},
            "raw_sentences": {name: it.states() for name, it in self.raw_sentences.items()},
            "maps": {} if self.maps is None else self.maps.pooled(),
        }


class Streamed:
    """Takes states and maps from the batch, as copies: the batch's arrays are used again."""

    resident: tuple[str, ...] = ()  # kinds of features that need not be streamed

    def states(
        self, batch: Batch, view: int, rows: Array, begin: Tensor
    ) -> dict[str, TeacherStates]:
        """Return states by name of the batch's tokens `rows` [J], for runs that begin at `begin`
        [G] among them."""
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
        """Return entries by name, where among them the maps of the B texts begin, and their
        codec."""
        stored = {name: batch.stored[maps_path(view, name)] for name in batch.attention}
        begin = begins(np.diff(batch.start) ** 2)
        entries = {name: torch.from_numpy(codes.copy()) for name, codes in stored.items()}
        return entries, begin, batch.level.attention


def maps_path(view: int, name: str) -> str:
    """Return the path of the maps `name` of a view in a part."""
    return f"view{view}/attention/{name}/values"


@dataclass(frozen=True)
class Distillation:
    """Holds the teacher's targets for G runs of one alignment, of the student's flat tokens.

    Targets that no loss of this alignment reads are empty. States and maps are empty until
    `StudentBatch.to`, too.
    """

    inputs: Inputs | None  # a second input (reduce); None: the runs are of the masked native input
    runs: Runs
    logit_runs: Runs | None  # the runs that have logit targets
    logits: LogitTargets | None
    shared: SharedTargets | None
    map_pooling: MapPooling | None
    task: TaskTargets | None
    encoded: Encoded | None  # the five below before they are decoded; None afterwards
    # float32 [G,D] by name: pooled states, normalised per channel
    normalised: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)  # [G,D] by name: pooled raw states
    # float32 [B,D] by name: normalised state of the first token
    sentences: dict[str, Tensor] = field(default_factory=dict)
    raw_sentences: dict[str, Tensor] = field(default_factory=dict)  # [B,D]: that state as it is
    maps: dict[str, Tensor] = field(default_factory=dict)  # [B,G',G'] by name: between runs

    def decoded(self) -> Distillation:
        """Decode the teacher's states and maps where they are, if that was not done already."""
        if self.encoded is None:
            return self
        return replace(self, encoded=None, **self.encoded.decoded())


@dataclass(frozen=True)
class StudentBatch:
    """Holds the data of one step. `masked` are the flat token numbers of `labels`, `characters`
    counts the characters under them, `tokens` the student's own tokens. `aligned` has what the
    teacher teaches, by the name of each alignment that a loss asks for, `vectors` [B,W] its vectors
    of the texts."""

    inputs: Inputs
    masked: Tensor  # int64 [M]
    labels: Tensor  # int64 [M]
    characters: int
    tokens: int
    aligned: dict[str, Distillation]
    vectors: Tensor | None = None

    @property
    def distillation(self) -> Distillation | None:
        """Return what the teacher teaches to losses of one alignment; None where it teaches
        nothing."""
        found = list(self.aligned.values())
        if len(found) > 1:
            raise ValueError(f"the batch is aligned in several ways: {', '.join(self.aligned)}")
        return found[0] if found else None

    @property
    def of_task(self) -> str | None:
        """Name the first alignment that has targets of a task; None where there are none."""
        return next((name for name, each in self.aligned.items() if each.task is not None), None)

    def masked_lm(self) -> dict[str, Tensor]:
        """Return the batch as models of transformers and their Trainer take it, for the masked-LM
        loss alone: `input_ids`, `attention_mask` and `labels` int64 [B,S], -100 where nothing is
        asked, and of pairs `token_type_ids`."""
        present = self.inputs.present
        asked = torch.full((int(present.sum()),), -100, device=self.labels.device)
        asked[self.masked] = self.labels
        labels = torch.full(present.shape, -100, device=asked.device)
        labels[present] = asked
        found = {
            "input_ids": self.inputs.ids,
            "attention_mask": present.long(),
            "labels": labels,
        }
        return found if self.inputs.types is None else found | {"token_type_ids": self.inputs.types}

    def to(self, device: torch.device) -> StudentBatch:
        """Move the batch to a device, and decode the teacher's states and maps there."""
        moved: StudentBatch = _moved(self, device)
        return replace(moved, aligned={n: taught.decoded() for n, taught in moved.aligned.items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            value = value.pin_memory()  # only then does the copy not keep this thread waiting
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{key: _moved(item, device) for key, item in vars(value).items()})
    return value
