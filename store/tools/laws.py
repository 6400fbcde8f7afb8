"""Check what the arrays of a part mean: the rules of FORMAT.md for values, and that the stored
tokenizer gives the stored tokens."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import version
from typing import Any

import numpy as np

from teachonce.store.errors import VERIFY, StoreError, without_remedy
from teachonce.store.format.codecs.levels import bound
from teachonce.store.format.layout import EMBEDDING
from teachonce.store.format.pairs import offsets_of
from teachonce.store.format.sequences import ACTIONS, wrong_gold
from teachonce.store.read.part import PartReader
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.read.stored_tokenizer import encoded, within_bounds
from teachonce.store.tools.damaged import open_damaged
from teachonce.support.arrays import Array, starts

BATCH = 256  # sequences that are tokenised at once
NARROW = 0.02  # of length 1: a teacher in bfloat16 normalises so exactly


def check_part(part: PartReader) -> list[str]:
    """A line for each rule that a part breaks. Raises StoreError if it cannot be read."""
    texts = part.texts(0, part.part.counts.sequences)
    lengths = np.array([len(text) for text in texts], np.int64)
    problems = [*_broken_tokens(part, lengths)]
    for view in range(part.features.views):
        problems += _broken_masks(part, view, lengths)
        problems += _broken_logits(part, view)
    problems += [*_broken_pairs(part, texts), *_broken_task(part), *_broken_vectors(part, texts)]
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


def _broken_pairs(part: PartReader, texts: list[str]) -> list[str]:
    """Problems of a store of pairs: each has one separator, which no token and no masked word
    covers."""
    separator = part.features.separator
    if separator is None:
        return []
    if several := [n for n, text in enumerate(texts) if text.count(separator) != 1]:
        return [f"text/utf8 of sequence {several[0]} of the part has not one {separator!r}"]
    place, problems = np.array([text.index(separator) for text in texts], np.int64), []
    spans = {"tokens": (part.all("token/begin"), part.all("token/end"), part.token_start)}
    for view in range(1, part.features.views):
        start, words = part.spans(view, 0, len(texts))
        spans[f"view{view}/mask"] = words[:, 0], words[:, 1], start
    for what, (begin, end, start) in spans.items():
        middle = np.repeat(place, np.diff(start))
        if ((begin <= middle) & (end > middle)).any():
            problems.append(f"{what}: some cover the separator of their pair")
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


def _broken_vectors(part: PartReader, texts: list[str]) -> list[str]:
    """Problems of a store with an embedding: a vector is finite, of length 1 where the store says
    so, and every text begins with the prompt."""
    if (spec := part.features.embedding) is None:
        return []
    problems, codec = [], part.features.level.embedding
    stored = {key: part.all(f"{EMBEDDING}/{key}") for key in codec.names}
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale
        vectors = codec.decode(stored, (spec.width,))
    if not np.isfinite(vectors).all():
        problems.append(f"{EMBEDDING}/values are not finite")
    elif spec.normalised:
        lengths = np.linalg.norm(vectors, axis=1)
        slack = NARROW + np.linalg.norm(bound(part.features.level, "embedding", vectors), axis=1)
        if (bad := np.abs(lengths - 1) > slack).any():
            problems.append(
                f"{EMBEDDING}/values of sequence {int(bad.argmax())} of the part have not length 1"
            )
    for number, text in enumerate(texts):
        if not text.startswith(spec.prompt):
            problems.append(f"text/utf8 of sequence {number} of the part lacks the prompt")
            break
    return problems


def parts_with_other_tokens(store: FeatureStore, places: list[int]) -> list[tuple[int, str]]:
    """The places of parts of which the stored tokenizer gives other tokens than are stored, each
    with a line. Raises StoreError for a tokenizer that goes beyond its bounds."""
    found: list[tuple[int, str]] = within_bounds(
        store.teacher_file("tokenizer.json"),
        sum(store.manifest.parts[place].counts.text_bytes for place in places),
        store.path,
        lambda: _other_parts(store, places),
        _other_parts_of,
        store.path,
        store.source.options,
        places,
    )
    return found


def _other_parts_of(
    path: str, options: dict[str, Any] | None, places: list[int]
) -> list[tuple[int, str]]:
    with closing(open_damaged(path, options).store) as store:
        return _other_parts(store, places)


def _other_parts(store: FeatureStore, places: list[int]) -> list[tuple[int, str]]:
    tokenizer, found = store.tokenizer(), []
    for place in places:
        part = store.part(place)
        try:
            line = other_tokens(part, tokenizer, 0, part.part.counts.sequences)
        except StoreError as error:
            found.append((place, without_remedy(error)))
            continue
        if line:
            found.append((place, f"{part.where}: {line}"))
    return found


def other_tokens(part: PartReader, tokenizer: Any, first: int, last: int) -> str | None:
    """Say for which of sequences first..last of a part `tokenizer` gives other tokens than are
    stored; None if there is no such. Raises StoreError for more tokens than a text can have."""
    for low in range(first, last, BATCH):
        high = min(low + BATCH, last)
        edges = part.token_start[low : high + 1]
        columns = ("id", "begin", "end", "special")
        stored = np.stack([part.read(f"token/{c}", edges[0], edges[-1]) for c in columns], axis=1)
        texts, separator = part.texts(low, high), part.features.separator
        found = encoded(tokenizer, texts, part.where, separator)
        for number, (text, encoding) in enumerate(zip(texts, found, strict=True), low):
            left, right = part.token_start[number : number + 2] - edges[0]
            if not np.array_equal(_rows(encoding, text, separator), stored[left:right]):
                return (
                    f"the tokenizer does not give the stored tokens of sequence {number} of the"
                    f" part ({len(encoding.ids)} tokens now, {right - left} stored)"
                )
    return None


def _rows(encoding: Any, text: str, separator: str | None) -> Array:
    special = np.array(encoding.special_tokens_mask, bool)
    spans = offsets_of(encoding, text, separator)
    return np.column_stack([np.array(encoding.ids, np.int64), spans, special])


def check_tokens(store: FeatureStore, places: int = 8, sequences: int = 8) -> None:
    """StoreError unless the stored tokenizer gives the stored tokens of `sequences` neighbours at
    each of some places, spread evenly over the store, within bounds of time and memory."""
    rows = np.unique(np.linspace(0, max(0, len(store) - 1), places).astype(int)).tolist()
    found = within_bounds(
        store.teacher_file("tokenizer.json"),
        len(rows) * sequences * store.features.max_length,
        store.path,
        lambda: _first_difference(store, rows, sequences),
        _first_difference_of,
        *(store.path, store.source.options, rows, sequences),
    )
    if found:
        written, here = store.meta["software"].get("tokenizers"), version("tokenizers")
        remedy = f"written with tokenizers {written}, read with {here}: install that version"
        if written in (None, here):
            remedy = VERIFY
        raise StoreError(f"{found}; {remedy}, or dump again")


def _first_difference_of(
    path: str, options: dict[str, Any] | None, rows: list[int], sequences: int
) -> str:
    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        return _first_difference(store, rows, sequences)


def _first_difference(store: FeatureStore, rows: list[int], sequences: int) -> str:
    tokenizer = store.tokenizer()
    for index in rows:
        part, first = store.locate(index)
        last = min(first + sequences, part.part.counts.sequences)
        if difference := other_tokens(part, tokenizer, first, last):
            return f"{part.where}: {difference}"
    return ""
