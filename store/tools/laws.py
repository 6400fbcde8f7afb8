"""Check what the arrays of a part mean: the rules of FORMAT.md for values, and that the stored
tokenizer gives the stored tokens."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from store.errors import VERIFY, StoreError
from store.format.sequences import ACTIONS, wrong_gold
from store.read.part import PartReader
from support.arrays import Array, starts

if TYPE_CHECKING:
    from store.read.store import FeatureStore

BATCH = 256  # sequences that are tokenised at once


def check_part(part: PartReader, tokenizer: Any = None) -> list[str]:
    """A line for each rule that a part breaks; `tokenizer` (or None) must give its tokens.

    Raises StoreError if the part cannot be read.
    """
    everything = (0, part.part.counts.sequences)
    texts = part.texts(*everything)
    lengths = np.array([len(text) for text in texts], np.int64)
    problems = [*_broken_tokens(part, lengths)]
    for view in range(part.features.views):
        problems += _broken_masks(part, view, lengths)
        problems += _broken_logits(part, view)
    problems += _broken_task(part)
    if not problems and tokenizer is not None:
        difference = other_tokens(part, tokenizer, *everything)
        problems += [difference] if difference else []
    return [f"{part.where}: {problem}" for problem in problems]


def _broken_tokens(part: PartReader, lengths: Array) -> list[str]:
    ids, begin, end = (part.all(f"token/{key}") for key in ("id", "begin", "end"))
    special, limit = part.all("token/special"), np.repeat(lengths, np.diff(part.token_start))
    assert len(part.square_start)  # checks the sizes of the attention maps
    laws = {
        "token ids outside the vocabulary": ids >= part.features.vocabulary,
        "offsets outside the text": (begin < 0) | (begin > end) | (end > limit),
        "special tokens with offsets": special & ((begin != 0) | (end != 0)),
    }
    return [_first(what, bad, part.token_start) for what, bad in laws.items() if bad.any()]


def _first(what: str, bad: Array, start: Array) -> str:
    row = int(bad.argmax())
    sequence = int(np.searchsorted(start, row, "right")) - 1
    return f"{what} (sequence {sequence} of the part, token {row - int(start[sequence])})"


def _broken_masks(part: PartReader, view: int, lengths: Array) -> list[str]:
    if view == 0:
        return []
    start, spans = part.spans(view, 0, len(lengths))
    if start[-1] != part.part.counts.spans[view]:
        return [f"view{view}/mask/start does not end at the number of masked words"]
    begin, end, action = spans.T
    after = np.zeros(len(spans), np.int64)
    after[1:] = end[:-1]
    heads = start[:-1]
    after[heads[heads < len(spans)]] = 0
    limit = np.repeat(lengths, np.diff(start))
    bad = (begin < after) | (begin >= end) | (end > limit) | (action >= ACTIONS)
    return [f"view{view}/mask is not ascending words of the text"] if bad.any() else []


def _broken_logits(part: PartReader, view: int) -> list[str]:
    spec, here = part.features.logits, f"view{view}/logits"
    if spec is None or spec.tier == "head":
        return []
    problems = []
    ids = part.all(f"{here}/ids")
    if ids.size and int(ids.max()) >= part.features.vocabulary:
        problems.append(f"{here}/ids are outside the vocabulary")
    if spec.tier == "sample":
        start = part.draw_start(view, 0, part.part.counts.tokens)
        counts = part.all(f"{here}/counts")
        total = starts(counts)
        whole = start[0] == 0 and start[-1] == len(ids)
        if not whole or (np.diff(total[start]) != spec.size).any():
            problems.append(f"{here}/counts do not sum to {spec.size} draws a token")
        inside = np.ones(len(ids), bool)  # behind another id of the same token
        inside[start[:-1][start[:-1] < len(ids)]] = False
        follows = np.diff(ids.astype(np.int64), prepend=0) > 0
        if (inside & ~follows).any() or not counts.all():
            problems.append(f"{here}/ids of a token do not ascend, or were drawn 0 times")
    return problems


def _broken_task(part: PartReader) -> list[str]:
    if (task := part.features.task) is None:
        return []
    problems = []
    if wrong_gold(task, part.all(task.gold), part.all("token/special")).any():
        problems.append(f"{task.gold} holds what is no label of the {task.kind}")
    for view in range(part.features.views):
        if not np.isfinite(part.all(f"view{view}/{task.outputs}/values")).all():
            problems.append(f"view{view}/{task.outputs}/values are not finite")
    return problems


def other_tokens(part: PartReader, tokenizer: Any, first: int, last: int) -> str | None:
    """Say for which of sequences first..last of a part `tokenizer` gives other tokens than are
    stored; None if there is no such."""
    for low in range(first, last, BATCH):
        high = min(low + BATCH, last)
        edges = part.token_start[low : high + 1]
        columns = ("id", "begin", "end", "special")
        stored = np.stack([part.read(f"token/{c}", edges[0], edges[-1]) for c in columns], axis=1)
        encodings = tokenizer.encode_batch(part.texts(low, high))
        for number, encoding in enumerate(encodings, low):
            left, right = part.token_start[number : number + 2] - edges[0]
            if not np.array_equal(_rows(encoding), stored[left:right]):
                return (
                    f"the tokenizer does not give the stored tokens of sequence {number} of the"
                    f" part ({len(encoding.ids)} tokens now, {right - left} stored)"
                )
    return None


def _rows(encoding: Any) -> Array:
    special = np.array(encoding.special_tokens_mask, bool)
    spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    spans[special] = 0
    return np.column_stack([np.array(encoding.ids, np.int64), spans, special])


def check_tokens(store: FeatureStore, places: int = 8, sequences: int = 8) -> None:
    """StoreError unless the stored tokenizer gives the stored tokens of `sequences` neighbours at
    each of some places, spread evenly over the store."""
    tokenizer = store.tokenizer()
    for index in np.unique(np.linspace(0, max(0, len(store) - 1), places).astype(int)):
        part, first = store.locate(int(index))
        last = min(first + sequences, part.part.counts.sequences)
        if difference := other_tokens(part, tokenizer, first, last):
            written, here = store.meta["software"].get("tokenizers"), version("tokenizers")
            remedy = f"written with tokenizers {written}, read with {here}: install that version"
            if written in (None, here):
                remedy = VERIFY
            raise StoreError(f"{part.where}: {difference}; {remedy}, or dump again")
