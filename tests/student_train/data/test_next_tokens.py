"""The tokens of a student that are trained on equal the result of a search by characters."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from teachonce.align import Alignment, Tokenizations, Tokens
from teachonce.store import LogitsSpec
from teachonce.store.read.record import Logits
from teachonce.student_train.data.distributions import Aligned, Distributions
from teachonce.student_train.data.next_tokens import (
    _normalised,
    following,
    inside_tokens,
    learnt_of_student,
    learnt_runs,
    next_pieces,
)
from teachonce.student_train.data.student_tokens import IGNORED
from teachonce.student_train.losses.next_token import NextTargets
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.arrays import Array, starts
from tests.align.support import encode, tokenizer, vocabulary, vocabulary_map
from tests.making.texts import SENTENCES

CUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4)


def tokens_of(texts: list[list[int]]) -> Tokens:
    """Make tokens with these numbers of characters, and a special token in front of each text."""
    spans = [[(0, 0), *zip(starts(sizes)[:-1], starts(sizes)[1:], strict=True)] for sizes in texts]
    flat = np.array([span for text in spans for span in text], np.int32)
    special = np.array([not place for text in spans for place in range(len(text))])
    return Tokens(np.arange(len(flat)), flat, special, starts([len(text) for text in spans]))


def split_again(sizes: list[int], rng: np.random.Generator) -> list[int]:
    """Cut a text of the same length at other places."""
    total = sum(sizes)
    inner = np.flatnonzero(rng.random(total - 1) < 0.5) + 1
    return [int(size) for size in np.diff([0, *inner.tolist(), total])]


def learnt_by_characters(learnt: Array, teacher: Tokens, student: Tokens) -> list[bool]:
    found = []
    for text in range(len(teacher.start) - 1):
        own = range(teacher.start[text], teacher.start[text + 1])
        out = {c for i in own if not learnt[i] for c in range(*teacher.offsets[i].tolist())}
        for i in range(student.start[text], student.start[text + 1]):
            found.append(out.isdisjoint(range(*student.offsets[i].tolist())))
    return found


@settings(max_examples=100)
@given(texts=CUTS, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.4, 0.8, 1.0]))
def test_the_learnt_tokens_of_a_student(texts: list[list[int]], seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    teacher = tokens_of(texts)
    student = tokens_of([split_again(sizes, rng) for sizes in texts])
    learnt = rng.random(len(teacher.ids)) < share
    found = learnt_of_student(learnt, teacher, student)
    assert found.tolist() == learnt_by_characters(learnt, teacher, student)
    read = following(student, found)
    expected = following(student).labels.copy()
    expected[[i for i in range(len(found) - 1) if not found[i + 1]]] = IGNORED
    assert np.array_equal(read.labels, expected) and read.learnt is not None
    runs = np.array([(i, i + 2) for i in range(0, len(student.ids) - 1, 2)], np.int32)
    chosen = learnt_runs(Alignment(runs, runs), found)
    assert chosen.student.tolist() == [run for run in runs.tolist() if found[slice(*run)].all()]


@settings(max_examples=100)
@given(texts=CUTS, seed=st.integers(0, 99))
def test_tokens_that_begin_inside_one_of_the_teacher(texts: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    teacher = tokens_of(texts)
    student = tokens_of([split_again(sizes, rng) for sizes in texts])
    runs, expected = list[list[tuple[int, int]]](), list[bool]()
    for text in range(len(texts)):
        # The cuts of a text, with the number of the token that begins there.
        sides = [
            {int(each.offsets[i, 0]): i for i in range(each.start[text] + 1, each.start[text + 1])}
            | {sum(texts[text]): int(each.start[text + 1])}
            for each in (teacher, student)
        ]
        cuts = sorted(sides[0].keys() & sides[1].keys())
        runs += [[(own[a], own[b]) for own in sides] for a, b in pairwise(cuts)]
        expected += [begin not in sides[0] for begin in sorted(sides[1])[:-1]]
    found = np.array(runs, np.int32)
    inside = inside_tokens(Alignment(found[:, 0], found[:, 1]), following(student).labels)
    assert inside.tolist() == expected


def test_a_piece_of_the_teacher_is_read_as_the_student_normalises_it() -> None:
    maps = vocabulary_map("bpe", "bpe")
    lower = Tokenizer.from_str(tokenizer("bpe").to_str())
    lower.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend(" ")]
    )
    for accent in ("\u0307a", "\u0308"):  # composed, with no letter before it
        assert _normalised(lower)(accent.encode()) == accent.encode()
    pieces = maps.teacher_bytes.written()
    plain = next_pieces(maps, tokenizer("bpe"))
    by_bytes = {raw: plain[number] for number, raw in enumerate(pieces) if raw}
    capital = [raw for raw in by_bytes if raw.isascii() and raw.lower() != raw]
    known = [raw for raw in capital if raw.lower() in by_bytes]
    found = dict(zip(pieces, next_pieces(maps, lower), strict=True))
    assert len(known) > 20 and all(found[raw] == by_bytes[raw.lower()] for raw in known)


@pytest.mark.parametrize("teacher", ["bpe", "unigram", "wordpiece", "bpe-ends"])
def test_the_next_token_is_the_one_that_the_student_reads(teacher: str) -> None:
    """Wherever single tokens of both sides have the same characters."""
    sides = encode(teacher, SENTENCES), encode("bpe", SENTENCES)
    found = Tokenizations(SENTENCES, *sides, vocabulary_map(teacher, "bpe"), 512)
    student, alignment = found.align("bytes")
    following = np.append(sides[0].ids[1:], 0).astype(np.int32)[:, None]
    nothing = np.zeros(len(following), np.float32)
    logits = Logits("topk", nothing, following, nothing[:, None], nothing - np.inf)
    batch: Any = SimpleNamespace(logits=logits)
    wanted = Aligned("bytes", ALIGNMENTS["bytes"], ["logits"], {"distribution"})
    spec = LogitsSpec("topk", 1, True)
    distributions = Distributions(found.vocabulary, tokenizer("bpe"), None, spec, exact=True)
    distributions.prepare(wanted, causal=True)
    runs, targets, _ = distributions.of_next(batch, wanted, found, student, alignment)
    assert isinstance(targets, NextTargets)
    single = (np.diff(alignment.teacher) == 1) & (np.diff(alignment.student) == 1)
    alone = np.isin(runs.member.numpy() + 1, alignment.student[single[:, 0], 0])
    assert alone.sum() > 0.9 * single.sum()
    read = targets.ids[alone, 0]
    known = read != vocabulary("bpe").roles["unk"]  # the teacher's unk has no text
    assert known.float().mean() > 0.8
    assert (read[known] == targets.following[alone][known]).all()
