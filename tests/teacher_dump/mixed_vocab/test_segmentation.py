"""Words of two vocabularies: segmented, masked and packed into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from teachonce.teacher_dump.mixed_vocab.segmentation import (
    MASKED,
    MASKED_BY_TEACHER,
    MixedBatch,
    Side,
    masked,
    mixed,
    shortened,
    word_numbers,
)
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import ENGLISH, SENTENCES
from tests.teacher_dump.mixed_vocab.support import mixer_of, some


def encoded(text: str, teacher: Any, student: Any) -> tuple[Any, Any]:
    return teacher.backend_tokenizer.encode(text), student.backend_tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-lower", "bpe", "unigram"])
def test_each_word_is_segmented_by_exactly_one_vocabulary(
    kind: str, make_tokenizer: Tokenizers, small: Any
) -> None:
    own = by_student = 0
    for seed, text in enumerate(SENTENCES * 5):
        encodings = encoded(text, make_tokenizer(kind), small)
        pieces = mixed(text, *encodings, 0.5, np.random.default_rng(seed))
        words = word_numbers(text, *(np.array(e.offsets) for e in encodings))
        covered = np.zeros((2, len(text)), bool)
        for begin, end in pieces.offsets[~pieces.special]:
            assert len(set(words[begin:end])) <= 1
        for place in np.flatnonzero(~pieces.special):
            begin, end = pieces.offsets[place]
            covered[int(pieces.own[place]), begin:end] = True
        for word in np.unique(words):
            sides = {bool(o) for o in pieces.own[(pieces.word == word) & ~pieces.special]}
            assert len(sides) <= 1
            have = [word in words[[b for b, e in en.offsets if e > b]] for en in encodings]
            own, by_student = own + all(have), by_student + (all(have) and sides == {True})
        # If a vocabulary drops a character (a blank, a control character), no piece covers it.
        for side, encoding in enumerate(encodings):
            expected = np.zeros(len(text), bool)
            for (begin, end), special in zip(
                encoding.offsets, encoding.special_tokens_mask, strict=True
            ):
                expected[begin:end] |= not special
            chosen = np.isin(words, pieces.word[pieces.own == bool(side)])
            assert (covered[side] == (expected & chosen)).all()
        visible = np.array([not c.isspace() and c.isprintable() for c in text])
        assert kind != "wordpiece" or covered[:, visible].any(0).all()
    assert abs(by_student / own - 0.5) < 0.03


def test_pieces_are_those_of_their_tokenizers_in_order(
    make_tokenizer: Tokenizers, small: Any
) -> None:
    text = ENGLISH[0]
    big = make_tokenizer("wordpiece")
    for share, tokenizer in ((0.0, big), (1.0, small)):
        pieces = mixed(text, *encoded(text, big, small), share, np.random.default_rng(0))
        assert pieces.ids.tolist() == tokenizer(text)["input_ids"]
        assert (pieces.own == bool(share)).all()
    both = mixed(text, *encoded(text, big, small), 0.5, np.random.default_rng(0))
    text_only = both.offsets[~both.special]
    assert (np.diff(text_only[:, 0]) > 0).all() and 0 < both.own.mean() < 1
    firsts = [mixed(text, *encoded(text, big, small), 0.5, np.random.default_rng(s)).own[0]
              for s in range(20)]  # fmt: skip
    assert len(set(firsts)) == 2  # the student's [CLS] is trained, too


def test_words_are_joined_where_a_token_covers_several() -> None:
    text = "a cat don't, 猫犬"
    assert word_numbers(text).tolist() == [0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8]
    joined = word_numbers(text, np.array([[0, 5], [13, 15], [7, 7]]))
    assert joined.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 5]


def test_too_long_sequences_lose_whole_words_at_their_end(
    make_tokenizer: Tokenizers, small: Any
) -> None:
    text = SENTENCES[3]
    whole = mixed(
        text, *encoded(text, make_tokenizer("wordpiece"), small), 0.5, np.random.default_rng(1)
    )
    for longest in range(4, len(whole.ids) + 2):
        short = shortened(whole, longest)
        assert len(short.ids) <= longest and short.special.sum() == whole.special.sum()
        kept = set(short.word[~short.special])
        if len(kept) > 1:
            expected = [i for i, w in zip(whole.ids, whole.word, strict=True)
                        if w in kept or w in (whole.word[0], whole.word[-1])]  # fmt: skip
            assert short.ids.tolist() == expected


def test_masks_are_whole_pieces_and_bounded(make_tokenizer: Tokenizers, small: Any) -> None:
    big = make_tokenizer("wordpiece")
    sides = Side.of(big), Side.of(small)
    text = " ".join(ENGLISH)
    seen = np.zeros(3)
    for seed in range(60):
        chance = np.random.default_rng(seed)
        pieces = mixed(text, *encoded(text, big, small), 0.3, chance)
        found = masked(pieces, sides, 0.15, chance)
        own = pieces.own[found.places]
        assert len(found.places) == MASKED and (~own).sum() <= MASKED_BY_TEACHER
        assert not pieces.special[found.places].any()
        assert (found.labels == pieces.ids[found.places]).all()
        elsewhere = np.setdiff1d(np.arange(len(pieces.ids)), found.places)
        assert (found.ids[elsewhere] == pieces.ids[elsewhere]).all()
        masks = np.where(own, small.mask_token_id, big.mask_token_id)
        read = found.ids[found.places]
        kinds = (read == masks, (read != masks) & (read != found.labels), read == found.labels)
        seen += [kind.sum() for kind in kinds]
    assert np.allclose(seen / seen.sum(), (0.8, 0.1, 0.1), atol=0.04)
    short = mixed("no", *encoded("no", big, small), 0.5, chance)
    assert len(masked(short, sides, 0.01, chance).places) == 1


def same(one: MixedBatch, other: MixedBatch) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_batches_are_a_function_of_seed_and_number(tiny_teacher: Teachers, small: Any) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    mixer = mixer_of(teacher, small)
    batches = some(mixer, 8)
    assert all(batch.ids.numel() <= 1024 for batch in batches)
    assert all(map(same, batches[5:], some(mixer, 3, first=5)))
    assert not same(batches[0], some(mixer_of(teacher, small, seed=4), 1)[0])
    sequences = np.cumsum([len(batch.ids) for batch in some(mixer, 40)]).tolist()
    epochs = [len(SENTENCES) * times for times in range(1, 1 + sequences[-1] // len(SENTENCES))]
    assert epochs and set(epochs) <= set(sequences)  # every text occurs once in an epoch
    assert not any(map(same, batches[:2], batches[2:4]))
