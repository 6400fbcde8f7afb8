"""Random access to one sequence; each field is read and decoded on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex, overload

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.features import LEARN, Calibration, Features
from teachonce.store.format.sequences import split_pair
from teachonce.store.read.part import PartReader
from teachonce.support.arrays import Array, Floats, begins, covering_spans
from teachonce.support.console import counted
from teachonce.support.differences import first_few
from teachonce.support.html import html_table

SHOWN = 16  # tokens of a record in a notebook


@dataclass(frozen=True)
class Logits:
    """Holds the logits of T tokens. The tier determines which fields are set.

    topk: ids int32 [T, K], logprobs [T, K], rest [T] (log of the probability of all other ids).
    sample: ids int32 [M] and their counts [M] among `draws` random draws for each token; start
        int64 [T + 1], where the ids of each token begin.
    head: values float32 [T, D], the input of the frozen LM head.
    All tiers: log_partition float32 [T] (logsumexp of the raw logits).
    observed: float32 [T], in row t the log-probability of token t + 1; -inf in the last row of a
        sequence. None if the store has none (see `LogitsSpec`).
    """

    tier: str
    log_partition: Floats
    ids: Any = None
    logprobs: Any = None
    rest: Any = None
    start: Any = None
    counts: Any = None
    draws: int | None = None
    values: Any = None
    observed: Any = None

    def __repr__(self) -> str:
        """Return only the tier and the sizes, as the arrays would fill screens."""
        kind = self.tier if self.ids is None or self.ids.ndim < 2 else f"topk:{self.ids.shape[1]}"
        return f"<Logits: {counted(len(self.log_partition), 'teacher token')}, {kind}>"


class LazyMap(Mapping[str, Any]):
    """Maps keys to values, read-only; values are loaded at each access."""

    def __init__(self, names: tuple[str, ...], load: Callable[[str], Any], kind: str) -> None:
        self._names, self._load, self._kind = names, load, kind

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            available = ", ".join(self._names) or "none"
            raise MissingFeature(f"no {self._kind} {name!r} in this store; it has: {available}")
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would load the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        """Return the names alone, which loads no value."""
        return f"<{self._kind}: {first_few(self._names) or 'none'}>"


class MissingFeature(StoreError, KeyError):
    """Describes a feature that the store does not hold."""

    def __str__(self) -> str:
        # KeyError's own method would put the message into quotes.
        return str(self.args[0])


def as_ids(stored: Array) -> Array:
    """View uint32 ids as int32 without a copy; ids are below 2^31."""
    return stored.view(np.int32)


def decode_logits(features: Features, read: Callable[[str], Array], start: Array | None) -> Logits:
    """Decode the stored logits of some tokens. `read` returns a stored array of their group by its
    name; `start` [T + 1] is the first draw of each token, in tier `sample`."""
    assert features.logits is not None
    tier, size, level = features.logits.tier, features.logits.size, features.level
    partition = read("log_partition")
    observed = level.rest.from_codes(read("observed")) if features.logits.observed else None
    if tier == "topk":
        logprobs = level.logprobs.from_codes(read("logprobs"))
        rest = level.rest.from_codes(read("rest"))
        return Logits(tier, partition, as_ids(read("ids")), logprobs, rest, observed=observed)
    if tier == "sample":
        ids, counts = as_ids(read("ids")), read("counts")
        drawn = Logits(tier, partition, ids, start=start, counts=counts, draws=size)
        return replace(drawn, observed=observed)
    stored = {key: read(key) for key in level.head.names}
    return Logits(tier, partition, values=level.head.decode(stored, (size,)))


def learnt_tokens(context: Array | None, learn: Array | None, lengths: Array) -> Array | None:
    """Return bool [N]: the tokens that students are trained on; None, which means all, if `context`
    and `learn` are None.

    lengths: [B], tokens of each sequence. context: [B], the number of first tokens of each sequence
    that are left out. learn: bool [N], the tokens that are marked in the store.
    """
    if context is None:
        return learn
    position = np.arange(int(lengths.sum())) - np.repeat(begins(lengths), lengths)
    after = position >= np.repeat(context, lengths)
    return np.asarray(after if learn is None else after & learn)


class View:
    """Holds one forward pass over a sequence of T tokens."""

    def __init__(self, record: Record, number: int) -> None:
        self._record, self.number = record, number
        features = record.features
        self.hidden = LazyMap(features.hidden, self._hidden, "hidden state")
        self.attention = LazyMap(features.attention, self._attention, "attention map")

    def __repr__(self) -> str:
        return f"<View {self.number} of {self._record!r}>"

    def _rows(self, name: str) -> Array:
        record = self._record
        begin, end = record.tokens
        return record.part.read(f"view{self.number}/{name}", begin, end)

    @cached_property
    def spans(self) -> Array:
        """Return int32 [M, 3], characters begin, end, and action (0 mask, 1 random, 2
        unchanged)."""
        if self.number == 0:
            return np.empty((0, 3), np.int32)
        position = self._record.position
        return self._record.part.spans(self.number, position, position + 1)[1]

    @cached_property
    def mask(self) -> Array:
        """Return bool [T], tokens that overlap a masked span."""
        return covering_spans(*self._record.offsets.T, *self.spans[:, :2].T) >= 0

    @cached_property
    def logits(self) -> Logits:
        """Return the logits of the store's tier. Raises StoreError if it holds none."""
        features, part = self._record.features, self._record.part
        if features.logits is None:
            raise MissingFeature("no logits in this store; dump with --logits topk:64")
        begin, end = self._record.tokens
        prefix, start = f"view{self.number}/logits", None
        flat = (0, 0)
        if features.logits.tier == "sample":
            start = part.draw_start(self.number, begin, end)
            flat = (int(start[0]), int(start[-1]))
            start = start - start[0]

        def read(key: str) -> Array:
            # In tier `sample`, only these two have a row for each draw instead of each token.
            ragged = start is not None and key in ("ids", "counts")
            return part.read(f"{prefix}/{key}", *(flat if ragged else (begin, end)))

        return decode_logits(features, read, start)

    def _task(self, kind: str, rows: tuple[int, int]) -> Array:
        task, part = self._record.features.task, self._record.part
        if task is None or task.kind != kind:
            available = task.kind if task else "no task"
            raise MissingFeature(f"no logits of {kind} in this store; it has: {available}")
        return part.read(f"view{self.number}/{task.outputs}/values", *rows)

    @cached_property
    def class_logits(self) -> Floats:
        """Return float32 [C], raw logits of the teacher's classes. Raises StoreError if there are
        none."""
        position = self._record.position
        row: Floats = self._task("classification", (position, position + 1))[0]
        return row

    @cached_property
    def tag_logits(self) -> Floats:
        """Return float32 [T, C], raw logits of the teacher's tags. Raises StoreError if there are
        none."""
        return self._task("tagging", self._record.tokens)

    def _hidden(self, name: str) -> Floats:
        """Return float32 [T, D], raw states."""
        codec = self._record.features.level.hidden
        stored = {key: self._rows(f"hidden/{name}/{key}") for key in codec.names}
        states: Floats = codec.decode(stored, *self._record.calibration[name])
        return states

    def _attention(self, name: str) -> Floats:
        """Read attention map `name` and decode it to probabilities, float32 [T, T]."""
        part, position = self._record.part, self._record.position
        begin, end = (int(edge) for edge in part.square_start[position : position + 2])
        codes = part.read(f"view{self.number}/attention/{name}/values", begin, end)
        length = self._record.tokens[1] - self._record.tokens[0]
        probabilities: Floats = self._record.features.level.attention.from_codes(codes)
        return probabilities.reshape(length, length)


class Views(tuple[View, ...]):
    """Lists the views of a sequence, by number. A missing view raises IndexError."""

    @overload
    def __getitem__(self, number: SupportsIndex) -> View: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[View, ...]: ...
    def __getitem__(self, number: SupportsIndex | slice) -> View | tuple[View, ...]:
        try:
            return super().__getitem__(number)
        except IndexError:
            have = f"{counted(len(self), 'view')}, numbered from 0"
            raise IndexError(f"view {number}: the store has {have}") from None


class Record:
    """Holds one sequence of T tokens; each field is read on first use."""

    def __init__(
        self, index: int, part: PartReader, position: int, calibration: Calibration
    ) -> None:
        self.index, self.part, self.position = index, part, position
        self.features, self.calibration = part.features, calibration
        begin, end = part.token_start[position : position + 2]
        self.tokens = (int(begin), int(end))
        self.views = Views(View(self, number) for number in range(self.features.views))

    def _one(self, name: str) -> Any:
        return self.part.read(f"sequence/{name}", self.position, self.position + 1)[0]

    @cached_property
    def document(self) -> int:
        """Return the number of the document in the corpus, from 0."""
        return int(self._one("document"))

    @cached_property
    def document_begin(self) -> int:
        """Return where the sequence starts in its document, in characters."""
        return int(self._one("document_begin"))

    @cached_property
    def hard_cut(self) -> bool:
        """Return whether the sequence starts inside a word."""
        return bool(self._one("hard_cut"))

    @cached_property
    def text(self) -> str:
        """Return the text of the sequence; for a pair, both texts with a separator between them."""
        return self.part.texts(self.position, self.position + 1)[0]

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Return the text, or both texts of a pair. Raises StoreError for a text that is no
        pair."""
        return split_pair(self.text, self.features.separator, self.part.where)

    @cached_property
    def token_ids(self) -> Array:
        """Return the ids of the tokens, int32 [T]."""
        return as_ids(self.part.read("token/id", *self.tokens))

    @cached_property
    def offsets(self) -> Array:
        """Return int32 [T, 2], where each token begins and ends, in characters of the text; (0, 0)
        for special tokens."""
        columns = [self.part.read(f"token/{key}", *self.tokens) for key in ("begin", "end")]
        return np.stack(columns, axis=1)

    @cached_property
    def special(self) -> Array:
        """Return bool [T], true for special tokens."""
        return self.part.read("token/special", *self.tokens)

    @cached_property
    def context(self) -> int:
        """Return the number of first tokens that only give context: they also end the previous
        sequence."""
        return int(self._one("context")) if self.features.context else 0

    @cached_property
    def learn(self) -> Array | None:
        """Return bool [T], the tokens that students are trained on; None if the store does not mark
        them."""
        return self.part.read(LEARN, *self.tokens) if self.features.learn else None

    @cached_property
    def messages(self) -> Array | None:
        """Return int32 [M, 3], the messages of a chat: begin and end of the content, in characters
        of the text, and role, its number in `ROLES`; None if the store has no messages."""
        if not self.features.messages:
            return None
        return self.part.spans(0, self.position, self.position + 1)[1]

    @cached_property
    def embedding(self) -> Floats:
        """Return float32 [W], the teacher's vector of the text. Raises StoreError if there is
        none."""
        if self.features.embedding is None:
            raise MissingFeature("no embedding in this store; dump with --head embedding")
        row: Floats = self.part.vectors(self.position, self.position + 1)[0]
        return row

    @cached_property
    def label(self) -> int | None:
        """Return the gold label of the text; None if it has none, or the store is not for
        classification."""
        task = self.features.task
        if task is None or task.kind != "classification":
            return None
        number = int(self._one("label"))
        return None if number < 0 else number

    @cached_property
    def tags(self) -> Array | None:
        """Return int32 [T], gold tags, -1 where there is none; None if the store is not for
        tagging."""
        task = self.features.task
        if task is None or task.kind != "tagging":
            return None
        return self.part.read(task.gold, *self.tokens)

    def __repr__(self) -> str:
        return f"Record(index={self.index}, tokens={self.tokens[1] - self.tokens[0]})"

    def _repr_html_(self) -> str:
        """Return a table of the text and the first tokens, which a notebook shows."""
        rows: list[tuple[object, object, object]] = [
            (self.text[begin:end] or ("special" if special else ""), number, f"{begin}-{end}")
            for number, (begin, end), special in zip(
                self.token_ids[:SHOWN], self.offsets[:SHOWN], self.special[:SHOWN], strict=True
            )
        ]
        omitted = self.tokens[1] - self.tokens[0] - len(rows)
        rows += [(f"{omitted:,} more", "", "")] if omitted else []
        caption = f"sequence {self.index} of document {self.document}: {self.text}"
        return html_table(caption, rows, ("token", "id", "characters"))
