"""Finds the text of captured token ids: one for which the tokenizer gives the very same ids.

A store is keyed by characters, and its tokenizer must give its tokens. Where the ids of a sample
are not what the tokenizer gives of any text (they begin inside a word, or were sampled piece by
piece) the sample is cut: stretches that can be kept are sequences of one document, and the tokens
between them are left out and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from teachonce.feature_store.captures.sample import Sample
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.windows.window import Window, make_window, storable

BATCH = 64  # samples that are tokenised at once
TRIED = 64  # tokens one after another at which a stretch is looked for in vain, at most
BACK = 8  # tokens that a stretch is shortened by, at most, to end where its text does
SHORTEST = 2  # tokens of a stretch
ENOUGH = 0.5  # share of the tokens of the first samples that must be kept, in long stretches
LONG = 32  # tokens of a long stretch; or most of its sample
LOOKED_AT = 1024  # tokens of one of the first samples that is not kept whole


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive tokens of a sample from `begin` on, as a sequence of the store."""

    window: Window
    sample: Sample
    begin: int

    @property
    def ids(self) -> Array:
        """Token ids [T]."""
        found: Array = self.window.ids
        return found


class Spelling:
    """A tokenizer with or without the special tokens that it puts around a text."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a `tokenizers.Tokenizer`, which stays as it is; `file` is its tokenizer.json."""
        from tokenizers import Tokenizer

        settings = json.loads(tokenizer.to_str())
        settings["padding"] = settings["truncation"] = None
        self.file = json.dumps(settings, ensure_ascii=False, sort_keys=True).encode()
        self.tokenizer = Tokenizer.from_str(self.file.decode())
        tokenizer = self.tokenizer
        mask = tokenizer.encode("a").special_tokens_mask
        ids = tokenizer.encode("a").ids
        inner = mask.index(0) if 0 in mask else len(mask)
        outer = mask[::-1].index(0) if 0 in mask else 0
        self.before, self.after = ids[:inner], ids[len(ids) - outer :]
        self.decoders = [tokenizer.decoder, *_plainer(tokenizer)]

    def texts(self, ids: Sequence[list[int]], decoder: Any) -> list[str]:
        """Return the texts of samples, without the special tokens around them."""
        if decoder is not None:
            self.tokenizer.decoder = decoder
        bare = [self._bare(each) for each in ids]
        found: list[str] = self.tokenizer.decode_batch(bare, skip_special_tokens=False)
        return [storable(text, Counter()) for text in found]

    def _bare(self, ids: list[int]) -> list[int]:
        first, last = len(self.before), len(ids) - len(self.after)
        whole = ids[:first] == self.before and ids[last:] == self.after and first <= last
        return ids[first:last] if whole else ids

    def whole(self, ids: Sequence[list[int]]) -> list[tuple[str, Any] | None]:
        """Return text and encoding of each sample; None where no text gives its ids."""
        found: list[tuple[str, Any] | None] = [None] * len(ids)
        for decoder in self.decoders:
            left = [place for place, each in enumerate(found) if each is None]
            texts = self.texts([ids[place] for place in left], decoder)
            encodings = self.tokenizer.encode_batch(texts)
            for place, text, encoding in zip(left, texts, encodings, strict=True):
                if encoding.ids == ids[place] and not all(encoding.special_tokens_mask):
                    found[place] = text, encoding
        return found

    def stretches(self, ids: list[int]) -> Iterator[tuple[int, str, Any]]:
        """Yield begin, text and encoding of the stretches of a sample that can be kept."""
        begin = tried = 0
        while begin <= len(ids) - SHORTEST and tried < TRIED:
            end, kept = self._longest(ids, begin)
            if kept is None:
                begin, tried = begin + 1, tried + 1
            else:
                yield begin, *kept
                begin, tried = end, 0

    def _longest(self, ids: list[int], begin: int) -> tuple[int, tuple[str, Any] | None]:
        """Find the end of the longest stretch from `begin`, with its text and encoding."""
        rest = ids[begin:]
        (kept,) = self.whole([rest])
        if kept is not None:
            return len(ids), kept
        (text,) = self.texts([rest], self.decoders[-1])
        given = self.tokenizer.encode(text).ids
        pairs = enumerate(zip(given, rest, strict=False))
        alike = next((n for n, (one, two) in pairs if one != two), min(len(given), len(rest)))
        for size in range(alike, max(alike - BACK, SHORTEST - 1), -1):
            (kept,) = self.whole([rest[:size]])
            if kept is not None:
                return begin + size, kept
        return begin, None

    def inside(self, ids: list[int], begin: int, text: str) -> bool:
        """Whether a stretch begins inside a word of the sample before it."""
        before, whole = self.texts([ids[:begin], ids], self.decoders[-1])
        joined = whole.startswith(before) and whole[len(before) : len(before) + 1] == text[:1]
        return joined and before[-1:].isalnum() and text[:1].isalnum()


def _plainer(tokenizer: Any) -> list[Any]:
    """Return a decoder of WordPiece that leaves blanks alone; no other kind has one."""
    from tokenizers import decoders

    found = json.loads(tokenizer.to_str()).get("decoder") or {}
    if found.get("type") != "WordPiece":
        return []
    return [decoders.WordPiece(prefix=found.get("prefix", "##"), cleanup=False)]


def without_specials(tokenizer: Any) -> Any:
    """Return the same tokenizer without special tokens around a text."""
    from tokenizers import Tokenizer

    found = json.loads(tokenizer.to_str())
    found["post_processor"] = _offsets_alone(found.get("post_processor"))
    return Tokenizer.from_str(json.dumps(found))


def _offsets_alone(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what a post-processor does to offsets, without the tokens that it adds."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        every = [_offsets_alone(each) for each in processor["processors"]]
        kept = [each for each in every if each is not None]
        return {"type": "Sequence", "processors": kept} if kept else None
    if kind == "RobertaProcessing":
        trims = {key: processor[key] for key in ("add_prefix_space", "trim_offsets")}
        return {"type": "ByteLevel", "use_regex": True, **trims}
    return processor if kind == "ByteLevel" else None


def spelling_of(tokenizer: Any, samples: Iterable[Sample], name: str) -> Spelling:
    """Choose how the ids of a capture are spelt, by its first samples: with the special tokens that
    the tokenizer puts around a text, or without.

    Raises UserError where neither gives back the ids of the capture.
    """
    first = list(islice(samples, BATCH))
    ids = [each.ids.tolist() for each in first if each.ids is not None]
    spelt = [Spelling(tokenizer)]
    if spelt[0].before or spelt[0].after:
        spelt.append(Spelling(without_specials(tokenizer)))
    found = [[_kept(each, row) for row in ids] for each in spelt]
    kept = [sum(count for count, _ in each) for each in found]
    best = kept.index(max(kept))
    total = sum(size for _, size in found[best])
    if kept[best] < ENOUGH * total or not total:
        where = first[0].where if first else "the capture"
        raise UserError(
            f"--tokenizer {name}: does not fit: of the first {total:,} token ids of the capture"
            f" (from {where}) it gives back {kept[best]:,} of the text that they spell; give the"
            " tokenizer of the teacher that was captured"
        )
    return spelt[best]


def _kept(spelling: Spelling, ids: list[int]) -> tuple[int, int]:
    """Count the tokens that are kept in long stretches, and those that were looked at.

    Another tokenizer gives back short stretches, too.
    """
    (whole,) = spelling.whole([ids])
    if whole is not None:
        return len(ids), len(ids)
    some = ids[:LOOKED_AT]
    counts = [len(encoding.ids) for _, _, encoding in spelling.stretches(some)]
    return sum(count for count in counts if count >= min(LONG, 0.75 * len(some))), len(some)


def stretches(
    samples: Iterable[Sample], spelling: Spelling, tally: Counter[str]
) -> Iterator[Stretch]:
    """Yield the sequences of the store that samples of ids give; each sample is a document.

    `tally` counts `samples`, those that were `cut`, those of which nothing was kept (`lost`) and
    the `tokens` that were left out.
    """
    rest, number = iter(samples), 0
    while batch := list(islice(rest, BATCH)):
        ids = [each.ids.tolist() if each.ids is not None else [] for each in batch]
        for sample, row, whole in zip(batch, ids, spelling.whole(ids), strict=True):
            tally["samples"] += 1
            found = [(0, *whole)] if whole else list(spelling.stretches(row))
            for begin, text, encoding in found:
                inside = spelling.inside(row, begin, text) if begin else False
                hard = inside or (not begin and sample.continues and text[:1].isalnum())
                (before,) = spelling.texts([row[:begin]], spelling.decoders[-1])
                window = make_window(text, number, len(before), hard, encoding)
                yield Stretch(window, sample, begin)
            left = len(row) - sum(len(encoding.ids) for *_, encoding in found)
            tally["tokens"] += left
            tally["cut" if found else "lost"] += bool(left)
            number += bool(found)
