"""Segments the words of a text at random by the teacher's or the student's tokenizer, and masks
pieces.

Both tokenizers encode the whole text, and each word gets its tokens from one of the encodings.
Offsets decide which tokens belong to a word, so any two tokenizers with offsets can be mixed.
Every function is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from teachonce.store.format.sequences import spans_of
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.windows.cutting import Encode, encoder
from teachonce.teacher_dump.windows.masked_views import maskable_spans
from teachonce.teacher_dump.windows.window import length_batches, padded

MASKED = 20  # the most masked pieces of a sequence; Zhao et al. 2021, section 4.2
MASKED_BY_TEACHER = 10  # the most of the teacher's: only student pieces are new to the network
POOL = 4096  # sequences that are sorted by length and shuffled together


class MixedPieces(NamedTuple):
    """Holds the tokens of one text, from one or both vocabularies.

    ids: int64 [T]. own: bool [T], true for the student's pieces. offsets: int64 [T, 2]. special:
        bool [T]. word: int64 [T], the number of the word; -1 for special tokens before the text.
    """

    ids: Array
    own: Array
    offsets: Array
    special: Array
    word: Array

    def at(self, rows: Array) -> MixedPieces:
        """Select tokens by numbers or by a mask."""
        return MixedPieces(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True)
class Side:
    """Holds one of the two tokenizers: a function that encodes texts, mask token, ordinary ids."""

    encode: Encode
    mask: int
    ordinary: Array  # int64: ids that are not special

    @classmethod
    def of(cls, tokenizer: Any) -> Side:
        """Make the side of a fast transformers tokenizer with a mask token."""
        special = set(tokenizer.all_special_ids)
        ids = [number for number in sorted(tokenizer.get_vocab().values()) if number not in special]
        encode = encoder(tokenizer.backend_tokenizer)
        return cls(encode, tokenizer.mask_token_id, np.array(ids, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class MaskedSequence:
    """Holds a network's input: ids int64 [L], and own bool [L], true for the student's pieces.

    `places` int64 [M] are the positions of masked pieces, `labels` int64 [M] their original ids.
    """

    ids: Array
    own: Array
    places: Array
    labels: Array


@dataclass(frozen=True)
class MixedBatch:
    """Holds masked sequences, padded to one length. `rows` are the positions of the M masked pieces
    in the flattened [B*L]."""

    ids: torch.Tensor  # int64 [B,L]
    own: torch.Tensor  # bool [B,L]: the student's pieces
    present: torch.Tensor  # bool [B,L]
    rows: torch.Tensor  # int64 [M]
    labels: torch.Tensor  # int64 [M], each of its own vocabulary
    labels_own: torch.Tensor  # bool [M]

    @classmethod
    def of(cls, sequences: list[MaskedSequence]) -> MixedBatch:
        ids, present = padded([s.ids for s in sequences], 0)
        own, _ = padded([s.own for s in sequences], 0)
        rows = [i * ids.shape[1] + s.places for i, s in enumerate(sequences)]
        columns = (
            ids,
            own.astype(bool),
            present,
            np.concatenate(rows),
            np.concatenate([s.labels for s in sequences]),
            np.concatenate([s.own[s.places] for s in sequences]),
        )
        return cls(*map(torch.from_numpy, columns))

    def to(self, device: torch.device) -> MixedBatch:
        return MixedBatch(*(column.to(device) for column in vars(self).values()))


def word_numbers(text: str, *offsets: Array) -> Array:
    """Return the word number of each character of a text: int64 [characters], ascending from 0.

    Words are found by `masked_views.maskable_spans`. If a token (offsets int [T, 2]) covers
    characters of several words, these and all between them are one word.
    """
    spans = np.concatenate([maskable_spans(text), *offsets]).astype(np.int64)
    # Special tokens have empty spans, which join nothing.
    spans = spans[spans[:, 0] < spans[:, 1]]
    # A boundary strictly inside a span divides no words: spans that only touch stay apart.
    open_spans = np.zeros(len(text) + 1, np.int64)
    np.add.at(open_spans, spans[:, 0] + 1, 1)
    np.add.at(open_spans, spans[:, 1], -1)
    return np.cumsum(np.cumsum(open_spans)[:-1] == 0) - 1


def mixed(
    text: str, teacher: Any, student: Any, share: float, chance: np.random.Generator
) -> MixedPieces:
    """Segment each word of `text` by the student's tokenizer with probability `share`, else by the
    teacher's.

    `teacher` and `student` are the text's `tokenizers.Encoding`s.
    """
    # The special tokens before the text count as one word, and the special tokens after it as
    # another: the embeddings of the student's special tokens must be trained.
    offsets = [spans_of([encoding]).astype(np.int64) for encoding in (teacher, student)]
    words = word_numbers(text, *offsets)
    sides = [
        _pieces(encoding, spans, words, own)
        for encoding, spans, own in zip((teacher, student), offsets, (False, True), strict=True)
    ]
    last = int(words[-1]) if len(words) else -1
    by_student = chance.random(last + 3) < share  # of words -1 to last + 1
    selected = [
        side.at(by_student[side.word + 1] == own) for side, own in zip(sides, (0, 1), strict=True)
    ]
    both_sides = MixedPieces(*(np.concatenate(pair) for pair in zip(*selected, strict=True)))
    return both_sides.at(np.argsort(both_sides.word, kind="stable"))


def _pieces(encoding: Any, offsets: Array, words: Array, own: bool) -> MixedPieces:
    special = np.array(encoding.special_tokens_mask, bool)
    # An empty span may be at the end of the text, where there is no character.
    first = np.minimum(offsets[:, 0], max(0, len(words) - 1))
    word = words[first] if len(words) else np.zeros(len(first), np.int64)
    if special.any():
        text = np.flatnonzero(~special)
        # Without text, the first half of the special tokens counts as before it: [CLS] of two.
        middle = text[0] if len(text) else (len(special) + 1) // 2
        leading = np.arange(len(special)) < middle
        word = np.where(special, np.where(leading, -1, words[-1] + 1 if len(words) else 0), word)
    ids = np.array(encoding.ids, np.int64)
    return MixedPieces(ids, np.full(len(ids), own), offsets, special, word)


def shortened(pieces: MixedPieces, longest: int) -> MixedPieces:
    """Truncate to `longest` tokens, between words. Special tokens are not removed.

    If the first word alone is too long, it is truncated inside.
    """
    excess = len(pieces.ids) - longest
    if excess <= 0:
        return pieces
    text = np.flatnonzero(~pieces.special)
    fitting = text[: max(0, len(text) - excess)]
    cut = pieces.word[text[len(fitting)]] if len(fitting) < len(text) else -1
    complete = fitting[pieces.word[fitting] != cut]
    fitting = complete if len(complete) else fitting
    return pieces.at(np.sort(np.concatenate([fitting, np.flatnonzero(pieces.special)])))


def masked(
    pieces: MixedPieces, sides: tuple[Side, Side], probability: float, chance: np.random.Generator
) -> MaskedSequence:
    """Mask a random share `probability` of the pieces, without special tokens.

    At least one piece is masked, at most MASKED, and at most MASKED_BY_TEACHER of the teacher's. A
    masked piece becomes the mask token of its vocabulary with probability 0.8, a random piece of it
    with 0.1, and is unchanged with 0.1 (Devlin et al. 2019, section 3.1).
    """
    order = chance.permutation(np.flatnonzero(~pieces.special))
    # Rounded at random, so that the share is right on average.
    count = min(MASKED, max(1, int(probability * len(order) + chance.random())))
    own = pieces.own[order]
    # Counted in random order, so that the teacher's pieces over the limit are random as well.
    allowed = own | (np.cumsum(~own) <= MASKED_BY_TEACHER)
    places = np.sort(order[allowed][:count])
    ids, action = pieces.ids.copy(), chance.random(len(places))
    for side, is_own in zip(sides, (False, True), strict=True):
        positions = places[pieces.own[places] == is_own]
        actions = action[pieces.own[places] == is_own]
        ids[positions[actions < 0.8]] = side.mask
        drawn = positions[(actions >= 0.8) & (actions < 0.9)]
        ids[drawn] = chance.choice(side.ordinary, len(drawn))
    return MaskedSequence(ids, pieces.own, places, pieces.ids[places])


@dataclass(frozen=True)
class Mixer:
    """Yields batches of a corpus endlessly. Each batch is a function of seed, epoch and texts.

    `texts` returns the texts of one epoch; `sides` are the teacher's and the student's tokenizer.
    The student's tokenizer segments the share `share` of the words. The share `probability` of the
    pieces is masked. A sequence has at most `longest` pieces.
    """

    texts: Callable[[], Iterable[str]]
    sides: tuple[Side, Side]
    share: float
    probability: float
    longest: int
    batch_tokens: int
    seed: int

    def batches(self, first: int = 0, every: int = 1) -> Iterator[MixedBatch]:
        """Skip `first` batches, then yield every `every`-th. The corpus is repeated endlessly."""
        # Skipped batches are made as well: the number of batches in a pool depends on its lengths.
        for sequences in islice(self._all(), first, None, every):
            yield MixedBatch.of(sequences)

    def _all(self) -> Iterator[list[MaskedSequence]]:
        epoch = 0
        while True:
            number, count, texts = 0, 0, iter(self.texts())
            while pool := list(islice(texts, POOL)):
                for batch in self._shuffled(pool, epoch, number):
                    count += len(batch)
                    yield batch
                number += len(pool)
            if count == 0:
                raise UserError("no text in the whole corpus; nothing to train on")
            epoch += 1

    def _shuffled(self, pool: list[str], epoch: int, number: int) -> Iterator[list[MaskedSequence]]:
        encodings = zip(*(side.encode(pool) for side in self.sides), strict=True)
        sequences = []
        for offset, (text, (teacher, student)) in enumerate(zip(pool, encodings, strict=True)):
            chance = np.random.default_rng([self.seed, epoch, number + offset])
            pieces = mixed(text, teacher, student, self.share, chance)
            if not pieces.special.all():
                pieces = shortened(pieces, self.longest)
                sequences.append(masked(pieces, self.sides, self.probability, chance))
        batches = length_batches([len(sequence.ids) for sequence in sequences], self.batch_tokens)
        # The 1 makes this another stream of random numbers than the stream of text `number`.
        chance = np.random.default_rng([self.seed, epoch, number, 1])
        for which in chance.permutation(len(batches)):
            yield [sequences[i] for i in batches[which]]
