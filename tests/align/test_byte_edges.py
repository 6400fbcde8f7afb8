"""The `bytes` alignment against plain Python, for tokenizers whose pieces are the bytes of a text,
and its laws for tokenizers that change the text."""

import json
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from teachonce.align import FlatText, Tokens, Vocabulary, VocabularyMap, align_bytes, align_span
from teachonce.align.byte_edges import NO_EDGE, PieceBytes, TextBytes, shared_runs, token_ends
from teachonce.align.vocabulary import byte_of_character
from teachonce.support.arrays import Array
from tests.align.support import SENTENCES, TEXT, TEXTS, pairs, tokens_of
from tests.align.support import tokenizer as other_tokenizer

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXACT = ("gpt-2", "gpt-2-trimmed", "llama-3", "llama-2")  # the pieces are the bytes of the text
NORMALISED = ("qwen", "nfd")  # the pieces are the bytes of the text in NFC or NFD
CHANGING = (*NORMALISED, "fallback-unigram", "unigram", "wordpiece", "wordpiece-lower")
KINDS = EXACT + CHANGING
COMPOSED = (
    *("e", "a", "x", "и", "か", "ᄒ", "한", "é", "ộ", "ά", "ẹ", "Å", "Ω", "क", " "),
    *("\u0301", "\u0323", "\u0302", "\u0306", "\u0345", "\u3099", "\u093c", "ᅡ", "ᆫ"),
)  # fmt: skip
few = settings(max_examples=25, deadline=None)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind in ("unigram", "wordpiece", "wordpiece-lower"):
        return other_tokenizer(kind)
    names = ["<s>", "</s>", "<unk>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    common: dict[str, Any] = {"show_progress": False}
    if kind == "fallback-unigram":
        built = Tokenizer(models.Unigram())
        built.normalizer = normalizers.NFKC()
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=500, unk_token="<unk>", special_tokens=names + fallback, **common
        )
    elif kind == "llama-2":
        built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        built.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names + fallback, **common)
    else:
        built = Tokenizer(models.BPE())
        if kind in NORMALISED:
            built.normalizer = normalizers.NFC() if kind == "qwen" else normalizers.NFD()
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.startswith("gpt-2"))
        split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
        built.pre_tokenizer = (
            level if kind.startswith("gpt-2") else pre_tokenizers.Sequence([split, level])
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300 if kind == "llama-3" else 420,
            special_tokens=names,
            initial_alphabet=alphabet,
            **common,
        )
    built.train_from_iterator(SENTENCES, trainer)
    if kind == "llama-2":  # training loses the model's own setting
        built.model.byte_fallback = True
    if kind in ("llama-2", "fallback-unigram"):  # ordinary pieces, which no trainer creates
        settings = json.loads(built.to_str())
        settings["added_tokens"] = [
            added for added in settings["added_tokens"] if added["content"] in names
        ]
        built = Tokenizer.from_str(json.dumps(settings))
    template = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
    )
    trim = processors.ByteLevel(trim_offsets=kind != "gpt-2")
    byte_level = kind in ("gpt-2", "gpt-2-trimmed", "llama-3", *NORMALISED)
    built.post_processor = processors.Sequence([trim, template]) if byte_level else template
    return built


@cache
def pieces(kind: str) -> PieceBytes:
    return PieceBytes.of(Vocabulary.from_tokenizer_json(tokenizer(kind).to_str()))


def encode(kind: str, texts: Sequence[str]) -> Tokens:
    return tokens_of(tokenizer(kind).encode_batch(list(texts)))


def written(kind: str, number: int) -> bytes:
    """Return the bytes of a piece, decoded as the tokenizer's own decoder does."""
    token = str(tokenizer(kind).id_to_token(number))
    if kind == "llama-2":
        if token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:-1])
        return token.replace("▁", " ").encode()
    alphabet = byte_of_character()
    return bytes(alphabet[character] for character in token)


def expected_ends(kind: str, text: str, tokens: Tokens, sequence: int) -> dict[int, int] | None:
    """Map each flat token to the byte of the text at which it ends: the sum of the pieces up to it.
    Return None if the pieces are not the text (an unknown piece)."""
    found, whole = {}, b""
    for token in range(int(tokens.start[sequence]), int(tokens.start[sequence + 1])):
        if not tokens.special[token]:
            whole += written(kind, int(tokens.ids[token]))
            found[token] = len(whole)
    dummy = int(kind == "llama-2" and bool(text))
    if whole != b" " * dummy + text.encode():
        return None
    return {token: end - dummy for token, end in found.items()}


def places(octets: TextBytes, ends: Array, sequence: int, token: int) -> int:
    return int(ends[token] - octets.start[sequence])


@few
@given(TEXTS)
def test_ends_are_the_sums_of_the_pieces(texts: list[str]) -> None:
    text = FlatText.of(texts)
    octets = TextBytes.of(text)
    for kind in EXACT:
        tokens = encode(kind, texts)
        ends = token_ends(text, octets, tokens, pieces(kind))
        assert (ends[tokens.special] == NO_EDGE).all()
        for sequence, one in enumerate(texts):
            expected = expected_ends(kind, one, tokens, sequence)
            if expected is None:
                assert kind == "llama-2"
                continue
            for token, end in expected.items():
                assert places(octets, ends, sequence, token) == end, (kind, one, token)


def reference(
    kinds: tuple[str, str], texts: Sequence[str], sides: tuple[Tokens, Tokens]
) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
    found = []
    for sequence, text in enumerate(texts):
        ends = list[dict[int, int]]()
        for kind, tokens in zip(kinds, sides, strict=True):
            some = expected_ends(kind, text, tokens, sequence)
            if some is None:
                return None
            ends.append(some)
        cuts = sorted({0} | (set(ends[0].values()) & set(ends[1].values())))
        for low, high in zip(cuts, cuts[1:], strict=False):
            runs = []
            for side in ends:
                before, inside = 0, []
                for token, end in side.items():
                    if low <= before < high:
                        inside.append(token)
                    before = end
                runs.append((min(inside), max(inside) + 1))
            found.append((runs[0], runs[1]))
    return found


@few
@given(TEXTS)
def test_runs_are_between_the_ends_that_both_sides_share(texts: list[str]) -> None:
    text = FlatText.of(texts)
    tokens = {kind: encode(kind, texts) for kind in KINDS}
    for teacher in EXACT:
        for student in EXACT:
            sides = tokens[teacher], tokens[student]
            found = shared_runs(text, *sides, (pieces(teacher), pieces(student)))
            expected = reference((teacher, student), texts, sides)
            runs = [
                (tuple(a), tuple(b))
                for a, b in zip(*(side.tolist() for side in found), strict=True)
            ]
            if expected is None:
                assert "llama-2" in (teacher, student)
            else:
                assert runs == expected, (teacher, student)


def equivalent(one: bytes, other: bytes) -> bool:
    """Return whether two byte strings are equal in Unicode; half a character equals only itself."""
    texts = (each.decode(errors="surrogateescape") for each in (one, other))
    return len({unicodedata.normalize("NFD", text) for text in texts}) == 1


@few
@given(st.lists(st.one_of(TEXT, st.lists(st.sampled_from(COMPOSED)).map("".join)), max_size=4))
def test_ends_of_composed_and_decomposed_text_divide_both_at_the_same_place(
    texts: list[str],
) -> None:
    text = FlatText.of(texts)
    octets = TextBytes.of(text)
    for kind in NORMALISED:
        tokens = encode(kind, texts)
        ends = token_ends(text, octets, tokens, pieces(kind))
        for sequence, one in enumerate(texts):
            whole, raw = b"", one.encode()
            for token in range(int(tokens.start[sequence]), int(tokens.start[sequence + 1])):
                if not tokens.special[token]:
                    whole += written(kind, int(tokens.ids[token]))
                    if ends[token] != NO_EDGE:
                        place = places(octets, ends, sequence, token)
                        assert equivalent(raw[:place], whole), (kind, one, token)


@pytest.mark.parametrize("kind", NORMALISED)
def test_a_letter_and_its_marks_are_a_run_for_a_tokenizer_that_changes_them(kind: str) -> None:
    texts = [unicodedata.normalize("NFD", "Žiak učiteľ "), "kôň é"]
    text = FlatText.of(texts)
    sides = encode(kind, texts), encode("gpt-2", texts)
    found = shared_runs(text, *sides, (pieces(kind), pieces("gpt-2")))
    runs = [
        [b"".join(written(each, int(i)) for i in tokens.ids[low:high]) for low, high in of]
        for each, tokens, of in zip((kind, "gpt-2"), sides, found, strict=True)
    ]
    assert all(map(equivalent, *runs)) and len(runs[0]) > 8
    assert b"".join(runs[1]) == "".join(texts).encode()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_laws_of_tokenizers_that_change_the_text(texts: list[str]) -> None:
    text = FlatText.of(texts)
    octets = TextBytes.of(text)
    tokens = {kind: encode(kind, texts) for kind in KINDS}
    for kind in CHANGING:
        ends = token_ends(text, octets, tokens[kind], pieces(kind))
        for sequence, one in enumerate(texts):
            low, high = map(int, tokens[kind].start[sequence : sequence + 2])
            known = ends[low:high][ends[low:high] != NO_EDGE] - octets.start[sequence]
            assert (np.diff(known) >= 0).all()
            assert ((known >= 0) & (known <= len(one.encode()))).all()
    for teacher, student in combinations_with_replacement(KINDS, 2):
        both = pieces(teacher), pieces(student)
        found = shared_runs(text, tokens[teacher], tokens[student], both)
        swapped = shared_runs(text, tokens[student], tokens[teacher], both[::-1])
        assert np.array_equal(found[0], swapped[1]) and np.array_equal(found[1], swapped[0])
        for runs, side in zip(found, (tokens[teacher], tokens[student]), strict=True):
            assert (runs[:, 0] < runs[:, 1]).all() and (runs[1:, 0] >= runs[:-1, 1]).all()
            assert not any(side.special[first:last].any() for first, last in runs)


def test_numbers_behind_a_blank_are_not_paired_with_the_number_alone() -> None:
    """`bytes` pairs `Ġ12` with the run `Ġ`, `12`; `span` pairs it with `12` alone."""
    vocabulary = {"Ġ": 0, "12": 1, "Ġ12": 2, "a": 3}

    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    settings = json.dumps({"model": model, "pre_tokenizer": level})
    own = Vocabulary.from_tokenizer_json(settings)
    text = FlatText.of(["a 12"])
    teacher = Tokens.of([[3, 2]], [[(0, 1), (2, 4)]], [[0, 0]])
    student = Tokens.of([[3, 0, 1]], [[(0, 1), (2, 2), (2, 4)]], [[0, 0, 0]])
    both = VocabularyMap.between(own, own)
    assert pairs(align_bytes(text, teacher, student, both)) == [((0, 1), (0, 1)), ((1, 2), (1, 3))]
    assert pairs(align_span(text, teacher, student)) == [((0, 1), (0, 1)), ((1, 2), (2, 3))]


@pytest.mark.parametrize("kind", EXACT)
def test_special_tokens_inside_a_text_are_in_no_run(kind: str) -> None:
    marked = Tokenizer.from_str(tokenizer(kind).to_str())
    marked.add_special_tokens([AddedToken("<|turn|>", special=True)])
    one = "A story<|turn|> is told"
    encoding = marked.encode(one)
    special = [number == marked.token_to_id("<|turn|>") for number in encoding.ids]
    special[0] = True
    teacher = Tokens.of([encoding.ids], [encoding.offsets], [special])
    own = PieceBytes.of(Vocabulary.from_tokenizer_json(marked.to_str()))
    student = encode("gpt-2", [one])
    runs, theirs = shared_runs(FlatText.of([one]), teacher, student, (own, pieces("gpt-2")))
    assert len(runs) > 2
    at = special.index(True, 1)
    assert not any(first <= at < last for first, last in runs)
    covered = [student.offsets[first:last] for first, last in theirs]
    marks = range(one.index("<|"), one.index("|>") + 2)
    assert not any(
        begin < place < end for rows in covered for begin, end in rows for place in marks
    )
