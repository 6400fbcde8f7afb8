"""A store's texts, pairs and chats in the student's tokens, and pooling over them.

- The tokens of a student that are trained on equal the result of a search by characters.
- Laws of chats in a student's own template: contents stay the same inside any marks.
- Pairs in the student's tokens: its tokenizer joins both texts, and each text is aligned
  separately.
- Tokenizers that change or drop text are reported, and refused if little text is left.
- Pooling of runs and of the maps between them equals hand computation; padding changes nothing.
"""

import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from teachonce.align import Alignment, FlatText, Tokenizations, Tokens, align_span
from teachonce.checkpoints.chat_template import filled, texts_around
from teachonce.store import FeatureStore, LogitsSpec, StoreError, open_store
from teachonce.store.format.features import ROLES
from teachonce.store.format.sequences import SEPARATOR
from teachonce.store.read.record import Logits
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.batch import MapPooling, Runs
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.distributions import Aligned, Distributions
from teachonce.student_train.data.next_tokens import (
    _normalised,
    following,
    inside_tokens,
    learnt_of_student,
    learnt_runs,
    next_pieces,
)
from teachonce.student_train.data.own_template import Chat, OwnTemplate, covers_any
from teachonce.student_train.data.spelled_text import (
    REFUSED,
    REPORTED,
    check_spelling,
    sampled,
    spelled_share,
)
from teachonce.student_train.data.student_tokens import IGNORED, pair_types, tokenize
from teachonce.student_train.losses.next_token import NextTargets
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import make_collator
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.arrays import Array, starts
from teachonce.support.errors import UserError
from teachonce.teacher_dump.windows.chats import messages_of
from tests.align.support import TEXT, encode, tokenizer, vocabulary, vocabulary_map
from tests.end_to_end.support import refused, says
from tests.making.models import Stores, Tokenizers, trained_tokenizer
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


TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
        "{% else %}{{ m.role | upper }}: {{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "strict": (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    ),
}
LETTERS = "aé文🙂 \n.<|/s>[]:"


@cache
def with_template(template: str) -> Any:
    found = trained_tokenizer("bpe-plain")
    marks = ["<|im_start|>", "<|im_end|>", "</s>"]
    found.add_special_tokens({"additional_special_tokens": marks})
    found.chat_template = TEMPLATES[template]
    return found


def render(template: str, messages: list[dict[str, str]]) -> str:
    return str(with_template(template).apply_chat_template(messages, tokenize=False))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_contents_and_their_tokens_stay(data: st.DataObject) -> None:
    theirs, ours = (data.draw(st.sampled_from(sorted(TEMPLATES))) for _ in range(2))
    roles = ["user", *data.draw(st.lists(st.sampled_from(ROLES), max_size=4))]
    each = st.text(LETTERS, max_size=8)
    contents = data.draw(st.lists(each, min_size=len(roles), max_size=len(roles)))
    around = texts_around(lambda messages: render(theirs, messages), roles)
    assert around is not None
    whole, spans = filled(around, contents)
    begin = data.draw(st.integers(0, len(whole) - 1))
    text = whole[begin : data.draw(st.integers(begin + 1, len(whole)))]
    stored = [(low, high, ROLES.index(r)) for (low, high), r in zip(spans, roles, strict=True)]
    chat = Chat(text, messages_of(stored, begin, text), begin > 0)
    found = with_template(theirs)(text, return_offsets_mapping=True)
    offsets = np.array(found["offset_mapping"], np.int32).reshape(-1, 2)
    count = len(offsets)
    start, special = np.array([0, count]), np.zeros(count, bool)
    teacher = Tokens(np.array(found["input_ids"]), offsets, special, start)
    marked = st.lists(st.booleans(), min_size=count, max_size=count)
    learnt = np.array(data.draw(marked), bool)
    store = mock.Mock(meta={"created": "2026-01-31T12:00:00Z"})
    own = OwnTemplate(with_template(ours), store)
    try:
        (read,), moved, marks = own.read([chat], teacher, learnt)
    except UserError as error:
        assert ours == "strict" and "user first" in str(error) and begin == 0
        return
    if not len(chat.messages):
        assert read == text
        return
    student = own.write(chat)
    kept = [text[low:high] for low, high, _ in chat.messages.tolist()]
    assert [read[low:high] for low, high in student.contents] == kept
    if text == whole:
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        assert read == render(ours, messages)
    assert (moved.offsets >= 0).all() and (moved.offsets <= len(read)).all()
    inside = np.zeros(len(offsets), bool)
    for (low, high, _), (first, _) in zip(chat.messages.tolist(), student.contents, strict=True):
        within = (offsets[:, 0] >= low) & (offsets[:, 1] <= high)
        inside |= within
        assert (moved.offsets[within] == offsets[within] + first - low).all()
        # The first token of a content may start with blanks before it.
        ahead = (offsets[:, 0] < low) & (offsets[:, 1] > low) & (offsets[:, 1] <= high)
        for n in np.flatnonzero(ahead):
            if not text[offsets[n, 0] : low].strip(" "):
                assert moved.offsets[n].tolist() == [first, offsets[n, 1] + first - low]
    assert len(marks) == len(read) and not moved.special[inside].any()
    unmarked = np.ones(len(read), bool)
    for (low, high), end in zip(student.contents, student.ends, strict=True):
        assert not marks[low:high].any()
        unmarked[low:end] = False
    # Text that is neither a content nor its end is a mark, except blanks before a content.
    left = [read[n] for n in np.flatnonzero(unmarked & ~marks)]
    assert set(left) <= {" "}
    native = Tokens(teacher.ids, moved.offsets, moved.special, teacher.start)
    assert not covers_any(marks, [read], native)[inside].any()


TEXTS = TEXT.map(lambda text: text.replace(SEPARATOR, " "))
KINDS = ("wordpiece", "bpe", "unigram")
BOTH = [(teacher, student) for teacher in KINDS for student in KINDS]


def sides(tokens: Tokens, texts: list[str]) -> Any:
    """Return the number of the text of each token; -1 for special tokens."""
    place = np.repeat([text.index(SEPARATOR) for text in texts], np.diff(tokens.start))
    return np.where(tokens.special, -1, tokens.offsets[:, 0] > place)


@pytest.mark.parametrize(("teacher", "student"), BOTH)
@settings(max_examples=25)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), size=st.integers(20, 200))
def test_runs_stay_within_a_text_of_a_pair(
    make_tokenizer: Tokenizers, teacher: str, student: str, pairs: list[tuple[str, str]], size: int
) -> None:
    texts = [SEPARATOR.join(pair) for pair in pairs]
    backend = copy.deepcopy(make_tokenizer(student).backend_tokenizer)
    backend.no_padding()
    backend.enable_truncation(size)
    own = tokenize(backend, texts, SEPARATOR)
    read = make_tokenizer(student)(
        [a for a, _ in pairs], [b for _, b in pairs], truncation=True, max_length=size,
        return_token_type_ids=True,
    )  # fmt: skip
    assert own.ids.tolist() == sum(read["input_ids"], [])
    assert own.types is not None and own.types.tolist() == sum(read["token_type_ids"], [])
    plain = copy.deepcopy(make_tokenizer(teacher).backend_tokenizer)
    plain.no_padding()
    plain.no_truncation()
    theirs = tokenize(plain, texts, SEPARATOR)
    found = align_span(FlatText.of(texts), theirs, own)
    ours, other = sides(own, texts), sides(theirs, texts)
    for taught, learnt in zip(found.teacher, found.student, strict=True):
        assert len({*other[slice(*taught)].tolist(), *ours[slice(*learnt)].tolist()}) == 1
    if teacher == student and len(own.ids) == len(theirs.ids):  # nothing is cut: all are paired
        paired = {n for run in found.student.tolist() for n in range(*run)}
        there = (own.offsets[:, 1] > own.offsets[:, 0]) & ~own.special
        assert paired >= set(np.flatnonzero(there).tolist())


@settings(max_examples=60)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_types_by_place_match_a_template_as_berts(
    make_tokenizer: Tokenizers, pairs: list[tuple[str, str]]
) -> None:
    texts = [SEPARATOR.join(pair) for pair in pairs]
    backend = copy.deepcopy(make_tokenizer("wordpiece").backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    tokens = tokenize(backend, texts, SEPARATOR)
    assert tokens.types is not None
    assert pair_types(tokens, texts, SEPARATOR).tolist() == tokens.types.tolist()


def test_a_text_that_is_no_pair(make_tokenizer: Tokenizers) -> None:
    backend = make_tokenizer("bpe").backend_tokenizer
    for text, times in (("one", 0), ("a\x1fb\x1fc", 2)):
        with pytest.raises(StoreError, match=f"occurs {times} times in .*, expected once"):
            tokenize(backend, ["a\x1fb", text], SEPARATOR)


@pytest.fixture(scope="module")
def causal(tiny_store: Stores) -> Path:
    return tiny_store("gpt2", attention="none")


@pytest.fixture(scope="module")
def trained(causal: Path) -> Any:
    with open_store(causal) as store:
        return student_tokenizer("400", store, family="llama-bpe")


def collator_of(store: FeatureStore, trained: Any, normalizer: Any) -> Collator:
    """Return the collator of a decoder whose tokenizer normalises the text."""
    tokenizer = copy.deepcopy(trained)
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.model_max_length = 256
    options = TrainOptions(str(store.path), student="llama:32x1x4", loss={"next": 1.0})
    return make_collator(plan_of(options, store), store, tokenizer)


@pytest.mark.parametrize(
    ("normalizer", "least", "most"),
    [
        (None, 0, 0),
        (normalizers.NFC(), 0, 0),
        (normalizers.Lowercase(), 0.01, 0.2),
        (normalizers.Replace("e", "3"), 0.05, 0.5),
        (normalizers.Replace(Regex("[^ ]"), "x"), 0.6, 1),
        (normalizers.Replace(" the", ""), 0.001, 0.1),
    ],
)
def test_the_share_that_is_changed(
    causal: Path, trained: Any, normalizer: Any, least: float, most: float
) -> None:
    with open_store(causal) as store:
        collator = collator_of(store, trained, normalizer)
        share = 1 - spelled_share(sampled(collator, store))
        assert least <= share <= most
        if share > REFUSED:
            with pytest.raises(UserError, match="--vocab DIR: its tokenizer changes or drops .*%"):
                check_spelling(collator, store, "DIR")
        else:
            line = check_spelling(collator, store, "DIR")
            assert line.startswith(f"{share:.0%} of the text") == (share > REPORTED)


def test_what_is_beyond_max_length_is_not_changed(causal: Path, trained: Any) -> None:
    with open_store(causal) as store:
        collator = collator_of(store, trained, None)
        collator.tokenizer.enable_truncation(7)
        assert spelled_share(sampled(collator, store)) == 1


def test_bytes_that_a_vocabulary_lacks_are_refused(
    causal: Path, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """It has neither pieces nor fallbacks for all bytes."""
    make_tokenizer("unigram").save_pretrained(tmp_path / "unigram")
    words = ("--store", causal, "--student", "llama:32x1x4", "--steps", "1", "--device", "cpu")
    said = refused(student_train, *words, "--vocab", tmp_path / "unigram", "--out", tmp_path / "s")
    says(said, "--vocab", "a fast tokenizer that encodes every byte", "such as 8k")


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_pooling_runs(how: str) -> None:
    values = torch.arange(12.0).reshape(6, 2)
    runs = Runs.of(np.array([[0, 1], [1, 4], [5, 6]]))
    divisor = 3 if how == "mean" else 1
    want = torch.stack([values[0], values[1:4].sum(0) / divisor, values[5]])
    torch.testing.assert_close(runs.pool(values, how), want)
    constant = Runs.of(np.array([[0, 2], [2, 6]])).pool(torch.ones(6, 3), "mean")
    torch.testing.assert_close(constant, torch.ones(2, 3))


def test_pooling_maps_adds_up_what_is_attended_and_averages_who_asks() -> None:
    maps = torch.tensor(
        [[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], [[0.6, 0.4, 0], [1, 0, 0], [0, 0, 0]]]
    )
    pooling = MapPooling.of(np.array([[0, 2], [2, 3], [3, 4]]), np.array([0, 3, 5]))
    pooled = pooling.pool(maps)
    torch.testing.assert_close(pooled[0], torch.tensor([[0.85, 0.15], [0.6, 0.4]]))
    assert pooling.present.tolist() == [[True, True], [True, False]]
    assert pooled[1, 0, 0] == pytest.approx(0.6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), padding=st.integers(0, 4))
def test_padding_of_maps_changes_no_pooled_map(seed: int, padding: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 3)
    start = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.flatnonzero(rng.random(start[-1]) < 0.7)
    if not len(firsts):
        return
    runs = np.stack([firsts, firsts + 1], axis=1)
    pooling, longest = MapPooling.of(runs, start), int(lengths.max())
    maps = torch.from_numpy(rng.random((3, longest, longest))).float()
    inside = torch.arange(longest) < torch.from_numpy(lengths)[:, None]
    square = inside[:, :, None] & inside[:, None, :]
    noisy = torch.where(square, maps, torch.full_like(maps, float(padding)))
    here = pooling.present
    pairs = here[:, :, None] & here[:, None, :]
    assert torch.equal(pooling.pool(noisy)[pairs], pooling.pool(maps)[pairs])
    assert int(here.sum()) == len(runs)
