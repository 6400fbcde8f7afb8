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
# Each search for a stretch tokenizes text again, so the searches in a sample are limited.
TRIED = 64  # after this number of tokens without a stretch, the rest of a sample is left out
BACK = 8  # most tokens by which a stretch is shortened to find an end that fits
SHORTEST = 2  # fewest tokens of a stretch
ENOUGH = 0.5  # least share of the tokens of the first samples in long stretches
LONG = 32  # fewest tokens of a long stretch, or 3/4 of a shorter sample
COMPARED = 256  # tokens in the first comparison; each further one has four times more
EXAMINED = 1024  # of a sample that does not fit as a whole, this many tokens are examined


@dataclass(frozen=True, eq=False)
class Stretch:
    """Holds consecutive tokens of a sample, from token `begin`, as a sequence of the store."""

    window: Window
    sample: Sample
    begin: int

    @property
    def ids(self) -> Array:
        """Return the token ids [T]."""
        ids: Array = self.window.ids
        return ids


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
        return self._decoded([self._bare(row) for row in ids], decoder)

    def texts_before(self, ids: list[int], begins: Iterable[int]) -> Iterator[str]:
        """Yield, for each token number in `begins`, the text of the tokens before it, from the
        previous number (at first 0) on. The numbers ascend."""
        bare, last = self._bare(ids), 0
        outer = len(self.before) if len(bare) < len(ids) else 0
        for begin in begins:
            # Decode a few tokens more, not the whole sample each time: the text of a token depends
            # on the token before it, as at the start of a text or of a word.
            first, end = max(0, last - BACK), max(0, begin - outer)
            shorter, longer = self._decoded([bare[first:last], bare[first:end]], self.decoders[-1])
            yield longer[len(shorter) :]
            last = end

    def _decoded(self, ids: list[list[int]], decoder: Any) -> list[str]:
        # `decode_batch` has no argument for the decoder.
        if decoder is not None:
            self.tokenizer.decoder = decoder
        texts: list[str] = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        return [storable(text, Counter()) for text in texts]

    def _bare(self, ids: list[int]) -> list[int]:
        first, last = len(self.before), len(ids) - len(self.after)
        wrapped = ids[:first] == self.before and ids[last:] == self.after and first <= last
        return ids[first:last] if wrapped else ids

    def round_trips(self, ids: Sequence[list[int]]) -> list[tuple[str, Any] | None]:
        """Return text and encoding of each sample; None for a sample whose text gives other ids."""
        matches: list[tuple[str, Any] | None] = [None] * len(ids)
        for decoder in self.decoders:
            pending = [index for index, match in enumerate(matches) if match is None]
            texts = self.texts([ids[index] for index in pending], decoder)
            encodings = self.tokenizer.encode_batch(texts)
            for index, text, encoding in zip(pending, texts, encodings, strict=True):
                # As in a dump, a text of special tokens alone makes no sequence.
                if encoding.ids == ids[index] and not all(encoding.special_tokens_mask):
                    matches[index] = text, encoding
        return matches

    def stretches(self, ids: list[int]) -> Iterator[tuple[int, str, Any]]:
        """Yield begin, text and encoding of each stretch of a sample; its text gives exactly its
        ids."""
        begin = tried = 0
        while begin <= len(ids) - SHORTEST and tried < TRIED:
            end, match = self._longest(ids, begin)
            if match is None:
                begin, tried = begin + 1, tried + 1
            else:
                yield begin, *match
                begin, tried = end, 0

    def _longest(self, ids: list[int], begin: int) -> tuple[int, tuple[str, Any] | None]:
        """Find the longest stretch of ids from `begin` whose text the tokenizer encodes to the same
        ids. Return its end, and its text with the encoding; `begin` and None if it would have fewer
        than SHORTEST tokens."""
        rest, size = len(ids) - begin, COMPARED
        # In growing pieces: else each stretch of a long sample would tokenize the whole rest.
        while True:
            piece = ids[begin : begin + size]  # not the whole rest, which may have a million tokens
            (text,) = self.texts([piece], self.decoders[-1])
            encoded = self.tokenizer.encode(text).ids
            pairs = enumerate(zip(encoded, piece, strict=False))
            shorter = min(len(encoded), len(piece))
            alike = next((n for n, (one, two) in pairs if one != two), shorter)
            if size >= rest:
                (match,) = self.round_trips([piece])
                if match is not None:
                    return len(ids), match
                break
            if alike < size - BACK:
                break
            size *= 4
        # The last tokens may change if the text ends there, so shorter stretches are tried, too.
        for size in range(alike, max(alike - BACK, SHORTEST - 1), -1):
            (match,) = self.round_trips([piece[:size]])
            if match is not None:
                return begin + size, match
        return begin, None


def _continues_word(before: str, sample: str, position: int, text: str) -> bool:
    """Return whether a stretch with the text `text` begins inside a word of its sample: at
    character `position` of the text `sample`, after the text `before`."""
    joined = sample.startswith(before + text[:1], position - len(before))
    return joined and before[-1:].isalnum() and text[:1].isalnum()


def _without_cleanup(tokenizer: Any) -> list[Any]:
    """Return a WordPiece decoder that leaves spaces unchanged; [] for other tokenizers.

    The default decoder removes spaces before punctuation, and the ids may then differ.
    """
    from tokenizers import decoders

    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") != "WordPiece":
        return []
    return [decoders.WordPiece(prefix=decoder.get("prefix", "##"), cleanup=False)]


def without_specials(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer that puts no special tokens around a text."""
    from tokenizers import Tokenizer

    settings = json.loads(tokenizer.to_str())
    settings["post_processor"] = _offsets_alone(settings.get("post_processor"))
    return Tokenizer.from_str(json.dumps(settings))


def _offsets_alone(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a post-processor that trims offsets, without the part that adds tokens;
    None if it trims none."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        every = [_offsets_alone(step) for step in processor["processors"]]
        steps = [step for step in every if step is not None]
        return {"type": "Sequence", "processors": steps} if steps else None
    if kind == "RobertaProcessing":
        trims = {key: processor[key] for key in ("add_prefix_space", "trim_offsets")}
        return {"type": "ByteLevel", "use_regex": True, **trims}
    return processor if kind == "ByteLevel" else None


def choose_tokenizer(tokenizer: Any, samples: Iterable[Sample], name: str) -> RoundTripTokenizer:
    """Return the tokenizer with or without its special tokens around a text, depending on whether
    the first samples have them.

    Some tools capture with special tokens, others without. Raises UserError if neither form gives
    the ids of the capture.
    """
    first = list(islice(samples, BATCH))
    ids = [sample.ids.tolist() for sample in first if sample.ids is not None]
    candidates = [RoundTripTokenizer(tokenizer)]
    if candidates[0].before or candidates[0].after:
        candidates.append(RoundTripTokenizer(without_specials(tokenizer)))
    counts = [[_fitting_tokens(candidate, row) for row in ids] for candidate in candidates]
    fitting = [sum(count for count, _ in rows) for rows in counts]
    # On a tie `index` takes the tokenizer as it is.
    best = fitting.index(max(fitting))
    total = sum(size for _, size in counts[best])
    if fitting[best] < ENOUGH * total or not total:
        where = first[0].where if first else "the capture"
        raise UserError(
            f"--tokenizer {name}: does not fit; of the first {total:,} token ids of the capture"
            f" (from {where}), tokenizing their text again gives back only {fitting[best]:,}; give"
            " the tokenizer of the captured teacher"
        )
    return candidates[best]


def _fitting_tokens(tokenizer: RoundTripTokenizer, ids: list[int]) -> tuple[int, int]:
    """Count the tokens of a sample that are in long stretches, and the tokens that were
    examined."""
    (match,) = tokenizer.round_trips([ids])
    if match is not None:
        return len(ids), len(ids)
    examined = ids[:EXAMINED]
    counts = [len(encoding.ids) for _, _, encoding in tokenizer.stretches(examined)]
    # Short stretches fit under a wrong tokenizer as well, so they prove nothing.
    return sum(count for count in counts if count >= min(LONG, 0.75 * len(examined))), len(examined)


def stretches(
    samples: Iterable[Sample], tokenizer: RoundTripTokenizer, tally: Counter[str]
) -> Iterator[Stretch]:
    """Yield the sequences of the store from samples of ids; each sample is a document.

    `tally` counts `samples`, samples that were `cut`, samples without a sequence (`lost`) and
    `tokens` that were left out.
    """
    rest, number = iter(samples), 0
    while batch := list(islice(rest, BATCH)):
        ids = [sample.ids.tolist() if sample.ids is not None else [] for sample in batch]
        for sample, row, match in zip(batch, ids, tokenizer.round_trips(ids), strict=True):
            tally["samples"] += 1
            parts = [(0, *match)] if match else list(tokenizer.stretches(row))
            (every,) = tokenizer.texts([[] if match else row], tokenizer.decoders[-1])
            befores, position = tokenizer.texts_before(row, [begin for begin, *_ in parts]), 0
            for (begin, text, encoding), before in zip(parts, befores, strict=True):
                position += len(before)
                inside = begin > 0 and _continues_word(before, every, position, text)
                # What came before was not captured: a first letter may continue a word.
                hard = inside or (not begin and sample.continues and text[:1].isalnum())
                window = make_window(text, number, position, hard, encoding)
                yield Stretch(window, sample, begin)
            dropped = len(row) - sum(len(encoding.ids) for *_, encoding in parts)
            tally["tokens"] += dropped
            tally["cut" if parts else "lost"] += bool(dropped)
            number += bool(parts)
