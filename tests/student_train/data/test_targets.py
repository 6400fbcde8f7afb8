"""The teacher's distribution in the student's vocabulary: no mass is lost, no piece appears
twice."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from teachonce.align import Tokenizations, Tokens
from teachonce.align.vocabulary import CHINESE, PUNCTUATION, isolation
from teachonce.store import Batch, Logits
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.targets import fold, word_begins
from teachonce.student_train.losses.next_token import NextTargets
from teachonce.student_train.plan.train_plan import terms_of
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.support.arrays import Array
from teachonce.training.words import word_spans
from tests.making.models import Tokenizers
from tests.making.texts import SENTENCES
from tests.student_train.kept_logits import V_STUDENT, V_TEACHER, kept_logits


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 20))
def test_folding_keeps_all_mass_and_names_each_piece_once(seed: int, k: int) -> None:
    vocabulary = np.random.default_rng(seed).integers(-1, V_STUDENT, V_TEACHER)
    ids, logprobs, rest, log_partition = kept_logits(seed, k)
    targets, some = fold(ids, logprobs, rest, log_partition, vocabulary)
    assert some.tolist() == (vocabulary[ids] >= 0).any(1).tolist()
    kept = torch.where(targets.valid, targets.logprobs.exp(), 0).sum(1)
    torch.testing.assert_close(
        kept + targets.rest.exp(), torch.ones(int(some.sum())), atol=1e-5, rtol=0
    )
    for row, g in enumerate(np.flatnonzero(some)):
        valid = targets.valid[row]
        pieces = targets.ids[row][valid].tolist()
        assert len(set(pieces)) == len(pieces)
        for piece, logprob in zip(pieces, targets.logprobs[row][valid].tolist(), strict=True):
            want = np.exp(logprobs[g][vocabulary[ids[g]] == piece]).sum()
            assert np.exp(logprob) == pytest.approx(want, rel=1e-4)


def batch_of(texts: list[str], tokens: Tokens, logits: Logits) -> Batch:
    rest: Any = dict.fromkeys(
        ("document", "spans_start", "spans", "hidden", "attention", "stored", "level")
    )
    return Batch(
        **rest,
        index=np.arange(len(texts)),
        start=tokens.start,
        token_ids=tokens.ids.astype(np.int32),
        offsets=tokens.offsets,
        special=tokens.special,
        logits=logits,
        load_texts=lambda: texts,
        load_embedding=lambda: None,
    )


WORDS = (
    *(" ", "\n", "\u3000", "a", "é", "e\u0301", "1", "ж", "한", "ก", "ำ", "_", "'", "’", ".", ","),
    *("-", "“", "$", "🙂", "灯", "々", "か", "\u3099", "カ", "ー", "・", "ｶ", "。", "、", "\u200b"),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS)).map("".join), max_size=4))
def test_words_are_the_files_in_texts_with_tags_else_those_that_student_predict_tags(
    texts: list[str],
) -> None:
    lengths = [len(text) for text in texts]
    first = np.array([i for length in lengths for i in range(length)], np.int32)
    tagged = np.repeat(np.arange(len(texts)) % 2, lengths).astype(bool)
    batch: Any = SimpleNamespace(
        texts=texts, start=np.cumsum([0, *lengths]), offsets=np.stack([first, first + 1], axis=1),
        special=np.zeros(len(first), bool), token_ids=first,
        tags=np.where(tagged & (first == 0), 0, -1),
    )  # fmt: skip
    wanted = [
        [match.start() for match in re.finditer(r"\S+", text)]
        if number % 2
        else [begin for begin, _ in word_spans(text)]
        for number, text in enumerate(texts)
    ]
    begins = word_begins(batch)
    assert [first[a:b][begins[a:b]].tolist() for a, b in pairwise(batch.start)] == wanted


def begins_a_word(text: str, begin: int, marked: bool) -> bool:
    if marked and text[max(0, begin - 1) : begin].isspace():
        begin -= 1
    before = text[:begin][-1:]
    return not before or before.isspace() or bool(isolation(before) & (CHINESE | PUNCTUATION))


# The student's pieces for the teacher's `s`: where a word starts without a blank, and elsewhere.
FORMS = {"wordpiece": ("s", "##s"), "bpe": ("s", "Ġs"), "unigram": ("s", "▁s")}


@pytest.mark.parametrize("tier", ["topk", "head"])
@pytest.mark.parametrize("align", ["span", "match"])
@pytest.mark.parametrize(
    ("kind", "student_kind"),
    [
        ("bpe", "wordpiece"),
        ("unigram", "wordpiece"),
        ("wordpiece", "bpe"),
        ("wordpiece", "unigram"),
    ],
)
def test_the_place_in_a_text_decides_which_mark_a_piece_has(
    make_tokenizer: Tokenizers, kind: str, student_kind: str, align: str, tier: str
) -> None:
    """The teacher has .75 for its own token, which the student reads there, .25 for `s`."""
    texts = [
        "“The story,” she told (the lamp): old-teller.", "(storms)", "stories, story\nthe s",
    ]  # fmt: skip
    student, teacher = make_tokenizer(student_kind), make_tokenizer(kind)
    tokens = tokenize(teacher.backend_tokenizer, texts)
    size, count = len(teacher), len(tokens.ids)
    own, other = tokens.ids.astype(np.int64), teacher.convert_tokens_to_ids("s")
    ids = np.stack([own, np.full(count, other)], axis=1)
    logprobs = np.log(np.tile(np.array([0.75, 0.25], np.float32), (count, 1)))
    nothing = np.zeros(count, np.float32)
    head: tuple[Array, Array] | None = None
    if tier == "topk":
        logits = Logits("topk", nothing, ids=ids, logprobs=logprobs, rest=nothing - np.inf)
    else:  # an identity: the inputs of this head are its outputs
        head = np.eye(size, dtype=np.float32), np.zeros(size, np.float32)
        values = np.full((count, size), -50, np.float32)
        np.put_along_axis(values, ids, logprobs, axis=1)
        logits = Logits("head", nothing, values=values)
    losses = {"kl": 1.0, **({"kl-shared": 1.0} if align == "match" else {})}
    options = TrainOptions(store="", loss=losses, align=align, targets="all")
    plan = BatchPlan(options, terms_of(options, None))
    backend = teacher.backend_tokenizer.to_str()
    collator = Collator(student, backend, plan, max_length=64, head=head)
    found = collator(batch_of(texts, tokens, logits), 0, (0,)).aligned[align]
    assert found.logits is not None
    native = tokenize(student.backend_tokenizer, texts)
    _, runs = Tokenizations(texts, tokens, native, collator.vocabulary, 64).align(align)
    single = np.flatnonzero(runs.teacher[:, 1] - runs.teacher[:, 0] == 1)
    assert len(single) == len(found.logits.ids) > 10
    each = zip(runs.teacher[single, 0].tolist(), runs.student[single, 0].tolist(), strict=True)
    places = set[bool]()
    for number, (row, position) in enumerate(each):
        # Byte-pair encoding does not spell a piece by the longest first, as the targets do.
        spelled = student_kind == "bpe" and np.ptp(runs.student[single[number]]) > 1
        if own[row] == other or spelled:
            continue
        text, begin = texts[tokens.sequence_of(row)], int(tokens.offsets[row, 0])
        marked = teacher.convert_ids_to_tokens(int(own[row]))[0] in "Ġ▁"
        reads = student.convert_ids_to_tokens(int(native.ids[position]))
        elsewhere = reads[0] in "Ġ▁" or not begins_a_word(text, begin, marked)
        places.add(elsewhere)
        piece = student.convert_tokens_to_ids(FORMS[student_kind][elsewhere])
        wanted = {int(native.ids[position]): 0.75}
        wanted[piece] = wanted.get(piece, 0) + 0.25
        kept = zip(found.logits.ids[number], found.logits.logprobs[number].exp(), strict=True)
        assert {int(i): p.item() for i, p in kept if p > 1e-6} == pytest.approx(wanted, abs=1e-3)
        if found.shared is not None:
            valid, shares = found.shared.valid[number], found.shared.logits[number].exp()
            kept = zip(found.shared.ids[number][valid], shares[valid], strict=True)
            shares_of = {int(i): p.item() for i, p in kept if p > 1e-6}
            assert shares_of == pytest.approx(wanted, abs=1e-3)
    assert places == {True, False} and (found.shared is None) == (align == "span")


def decoders_tokenizer(add_prefix_space: bool) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False)
    made.train_from_iterator(SENTENCES, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", pad_token="<s>")


@pytest.mark.parametrize("blanks", [(False, False), (True, False), (False, True), (True, True)])
def test_a_decoder_has_no_target_where_one_tokenizer_puts_a_blank_before_a_text(
    blanks: tuple[bool, bool],
) -> None:
    """The teacher is certain of the next token, and predicts the first piece after <s>."""
    teacher, student = map(decoders_tokenizer, blanks)
    texts = ["the story, the teller", "the lamp"]
    tokens = tokenize(teacher.backend_tokenizer, texts)
    ids = np.roll(tokens.ids, -1)[:, None]
    nothing = np.zeros(len(ids), np.float32)
    logits = Logits("topk", nothing, ids=ids, logprobs=nothing[:, None], rest=nothing - np.inf)
    options = TrainOptions(store="", student="llama:8x1x1", loss={"kl-next": 1.0})
    plan = BatchPlan(options, terms_of(options, None))
    backend = teacher.backend_tokenizer.to_str()
    collator = Collator(student, backend, plan, max_length=64, exact=False)
    found = collator(batch_of(texts, tokens, logits), 0, (0,)).aligned["bytes"]
    assert isinstance(found.logits, NextTargets) and found.logit_runs is not None
    assert found.logits.ids[:, 0].tolist() == found.logits.following.tolist()
    native = tokenize(student.backend_tokenizer, texts)
    first = native.start[:-1].tolist() if blanks[0] == blanks[1] else []
    before = found.logit_runs.member.tolist()
    assert [token for token in before if token in native.start] == first
