"""Find the text of captured token ids: tokenized again, it must give exactly the same ids.

A store is keyed by characters, and its tokenizer must reproduce its tokens. For some samples no
text gives the ids: they start inside a word, or were sampled piece by piece. Such a sample is cut:
the stretches that can be reproduced become sequences of one document, and the tokens between them
are left out and counted.
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

BATCH = 64  # samples that are tokenized together
# Each try tokenizes the rest of the sample, so the tries of a sample are limited.
TRIED = 64  # tokens in a row at which no stretch starts; then the rest of the sample is left out
BACK = 8  # tokens by which a stretch is shortened at most, to find an end that fits
SHORTEST = 2  # tokens of a stretch
ENOUGH = 0.5  # share of the tokens of the first samples that must be in long stretches
LONG = 32  # tokens of a long stretch; at most 3/4 of the sample
COMPARED = 256  # first tokens of a sample's rest that are compared before more of them are
EXAMINED = 1024  # first tokens that are examined of a sample that does not fit as a whole


@dataclass(frozen=True, eq=False)
class Stretch:
    """Holds consecutive tokens of a sample, from token `begin`, as a sequence of the store."""

    window: Window
    sample: Sample
    begin: int

    @property
    def ids(self) -> Array:
        """Return the token ids [T]."""
        found: Array = self.window.ids
        return found


class RoundTripTokenizer:
    """Decodes ids to text, and tokenizes the text again to check that it gives the same ids."""

    def __init__(self, tokenizer: Any) -> None:
        """Copy a `tokenizers.Tokenizer`; `file` is the tokenizer.json of the copy."""
        from tokenizers import Tokenizer

        settings = json.loads(tokenizer.to_str())
        # Padding adds tokens to a text, and truncation removes some.
        settings["padding"] = settings["truncation"] = None
        # Sorted keys: the identity of a store has the hash of this file.
        self.file = json.dumps(settings, ensure_ascii=False, sort_keys=True).encode()
        self.tokenizer = Tokenizer.from_str(self.file.decode())
        # Found with a text of one letter: the tokenizer puts the same tokens around every text.
        letter = self.tokenizer.encode("a")
        mask, ids = letter.special_tokens_mask, letter.ids
        inner = mask.index(0) if 0 in mask else len(mask)
        outer = mask[::-1].index(0) if 0 in mask else 0
        # Not ids[-outer:], which are all ids if `outer` is 0.
        self.before, self.after = ids[:inner], ids[len(ids) - outer :]
        self.decoders = [self.tokenizer.decoder, *_without_cleanup(self.tokenizer)]

    def texts(self, ids: Sequence[list[int]], decoder: Any) -> list[str]:
        """Decode samples to texts, without the special tokens around them."""
        return self._decoded([self._bare(each) for each in ids], decoder)

    def texts_before(self, ids: list[int], begins: Iterable[int]) -> Iterator[str]:
        """Yield, for each token number in `begins`, the text from the preceding number (at first 0)
        up to it. The numbers ascend."""
        bare, last = self._bare(ids), 0
        outer = len(self.before) if len(bare) < len(ids) else 0
        for begin in begins:
            # A few tokens more, not the whole sample for each: the text of a token depends on the
            # one before it, as at the start of a text or of a word.
            first, end = max(0, last - BACK), max(0, begin - outer)
            shorter, longer = self._decoded([bare[first:last], bare[first:end]], self.decoders[-1])
            yield longer[len(shorter) :]
            last = end

    def _decoded(self, ids: list[list[int]], decoder: Any) -> list[str]:
        # `decode_batch` has no argument for the decoder.
        if decoder is not None:
            self.tokenizer.decoder = decoder
        found: list[str] = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        return [storable(text, Counter()) for text in found]

    def _bare(self, ids: list[int]) -> list[int]:
        first, last = len(self.before), len(ids) - len(self.after)
        whole = ids[:first] == self.before and ids[last:] == self.after and first <= last
        return ids[first:last] if whole else ids

    def round_trips(self, ids: Sequence[list[int]]) -> list[tuple[str, Any] | None]:
        """Return text and encoding of each sample; None for a sample whose text gives other ids."""
        found: list[tuple[str, Any] | None] = [None] * len(ids)
        for decoder in self.decoders:
            left = [place for place, each in enumerate(found) if each is None]
            texts = self.texts([ids[place] for place in left], decoder)
            encodings = self.tokenizer.encode_batch(texts)
            for place, text, encoding in zip(left, texts, encodings, strict=True):
                # As in a dump, a text of special tokens alone makes no sequence.
                if encoding.ids == ids[place] and not all(encoding.special_tokens_mask):
                    found[place] = text, encoding
        return found

    def stretches(self, ids: list[int]) -> Iterator[tuple[int, str, Any]]:
        """Yield the stretches of a sample whose own text gives their ids: begin, text, encoding."""
        begin = tried = 0
        while begin <= len(ids) - SHORTEST and tried < TRIED:
            end, found = self._longest(ids, begin)
            if found is None:
                begin, tried = begin + 1, tried + 1
            else:
                yield begin, *found
                begin, tried = end, 0

    def _longest(self, ids: list[int], begin: int) -> tuple[int, tuple[str, Any] | None]:
        """Find the end of the longest stretch from `begin`, with its text and encoding."""
        left, size = len(ids) - begin, COMPARED
        # In growing pieces: a long sample of many stretches would be tokenized whole for each.
        while True:
            some = ids[begin : begin + size]  # not the whole rest, which may have a million tokens
            (text,) = self.texts([some], self.decoders[-1])
            given = self.tokenizer.encode(text).ids
            pairs = enumerate(zip(given, some, strict=False))
            shorter = min(len(given), len(some))
            alike = next((n for n, (one, two) in pairs if one != two), shorter)
            if size >= left:
                (found,) = self.round_trips([some])
                if found is not None:
                    return len(ids), found
                break
            if alike < size - BACK:
                break
            size *= 4
        # A text that ends earlier may give other last tokens, so shorter stretches are tried too.
        for size in range(alike, max(alike - BACK, SHORTEST - 1), -1):
            (found,) = self.round_trips([some[:size]])
            if found is not None:
                return begin + size, found
        return begin, None


def _continues_word(before: str, whole: str, place: int, text: str) -> bool:
    """Return whether a stretch with this text, at a character of the `whole` sample after the text
    `before`, begins inside a word."""
    joined = whole.startswith(before + text[:1], place - len(before))
    return joined and before[-1:].isalnum() and text[:1].isalnum()


def _without_cleanup(tokenizer: Any) -> list[Any]:
    """Return a WordPiece decoder that leaves spaces unchanged; [] for other tokenizers.

    The default decoder removes spaces before punctuation, and the ids may then differ.
    """
    from tokenizers import decoders

    found = json.loads(tokenizer.to_str()).get("decoder") or {}
    if found.get("type") != "WordPiece":
        return []
    return [decoders.WordPiece(prefix=found.get("prefix", "##"), cleanup=False)]


def without_specials(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer that puts no special tokens around a text."""
    from tokenizers import Tokenizer

    found = json.loads(tokenizer.to_str())
    found["post_processor"] = _offsets_alone(found.get("post_processor"))
    return Tokenizer.from_str(json.dumps(found))


def _offsets_alone(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a post-processor that trims offsets, without the part that adds tokens."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        every = [_offsets_alone(each) for each in processor["processors"]]
        found = [each for each in every if each is not None]
        return {"type": "Sequence", "processors": found} if found else None
    if kind == "RobertaProcessing":
        trims = {key: processor[key] for key in ("add_prefix_space", "trim_offsets")}
        return {"type": "ByteLevel", "use_regex": True, **trims}
    return processor if kind == "ByteLevel" else None


def choose_tokenizer(tokenizer: Any, samples: Iterable[Sample], name: str) -> RoundTripTokenizer:
    """Choose by the first samples whether the ids have the tokenizer's special tokens around them.

    Some tools capture with special tokens, others without. Raises UserError if neither form gives
    the ids of the capture.
    """
    first = list(islice(samples, BATCH))
    ids = [each.ids.tolist() for each in first if each.ids is not None]
    candidates = [RoundTripTokenizer(tokenizer)]
    if candidates[0].before or candidates[0].after:
        candidates.append(RoundTripTokenizer(without_specials(tokenizer)))
    found = [[_fitting_tokens(each, row) for row in ids] for each in candidates]
    fitting = [sum(count for count, _ in each) for each in found]
    # On a tie `index` takes the tokenizer as it is.
    best = fitting.index(max(fitting))
    total = sum(size for _, size in found[best])
    if fitting[best] < ENOUGH * total or not total:
        where = first[0].where if first else "the capture"
        raise UserError(
            f"--tokenizer {name}: does not fit; of the first {total:,} token ids of the capture"
            f" (from {where}), tokenizing their text again gives back only {fitting[best]:,}; give"
            " the tokenizer of the captured teacher"
        )
    return candidates[best]


def _fitting_tokens(tokenizer: RoundTripTokenizer, ids: list[int]) -> tuple[int, int]:
    """Count the tokens of a sample that are in long stretches, and the tokens examined."""
    (whole,) = tokenizer.round_trips([ids])
    if whole is not None:
        return len(ids), len(ids)
    some = ids[:EXAMINED]
    counts = [len(encoding.ids) for _, _, encoding in tokenizer.stretches(some)]
    # Short stretches fit under a wrong tokenizer as well, so they prove nothing.
    return sum(count for count in counts if count >= min(LONG, 0.75 * len(some))), len(some)


def stretches(
    samples: Iterable[Sample], tokenizer: RoundTripTokenizer, tally: Counter[str]
) -> Iterator[Stretch]:
    """Yield the sequences of the store from samples of ids; each sample is a document.

    `tally` counts `samples`, samples that were `cut`, samples without a sequence (`lost`) and
    `tokens` that were left out.
    """
    rest, number = iter(samples), 0
    while batch := list(islice(rest, BATCH)):
        ids = [each.ids.tolist() if each.ids is not None else [] for each in batch]
        for sample, row, whole in zip(batch, ids, tokenizer.round_trips(ids), strict=True):
            tally["samples"] += 1
            found = [(0, *whole)] if whole else list(tokenizer.stretches(row))
            (every,) = tokenizer.texts([[] if whole else row], tokenizer.decoders[-1])
            befores, place = tokenizer.texts_before(row, [begin for begin, *_ in found]), 0
            for (begin, text, encoding), before in zip(found, befores, strict=True):
                place += len(before)
                inside = begin > 0 and _continues_word(before, every, place, text)
                # What came before was not captured: a first letter may continue a word.
                hard = inside or (not begin and sample.continues and text[:1].isalnum())
                window = make_window(text, number, place, hard, encoding)
                yield Stretch(window, sample, begin)
            left = len(row) - sum(len(encoding.ids) for *_, encoding in found)
            tally["tokens"] += left
            tally["cut" if found else "lost"] += bool(left)
            number += bool(found)
