"""The text that a piece represents, normalizers, and the maps between all vocabularies.

- The text that a piece represents, and the maps between vocabularies of every kind.
- The normalizers of a tokenizer.json give the same text as the library `tokenizers`.
"""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from teachonce.align import AlignmentError, Tokens, Vocabulary, VocabularyMap
from teachonce.align.normalisers import normaliser_of
from teachonce.align.places import maps_at
from teachonce.align.text import FlatText
from tests.align.support import FRAGMENTS, KINDS, PAIRS, tokenizer, vocabulary, vocabulary_map

BERT = {"pre_tokenizer": {"type": "BertPreTokenizer"}}


def of(
    kind: str, pieces: list[str], added: tuple[str, ...] = (), parts: Any = None, **model: Any
) -> Vocabulary:
    """Return a vocabulary of these pieces; added tokens in brackets are special."""
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *added]))}
    vocab: Any = {piece: numbers[piece] for piece in pieces}
    if kind == "Unigram":
        vocab = [[piece, 0.0] for piece in pieces]
    entries = [{"id": numbers[t], "content": t, "special": t[0] in "[<"} for t in added]
    content = {"added_tokens": entries, "model": {"type": kind, "vocab": vocab, **model}}
    return Vocabulary.from_tokenizer_json(json.dumps(content | (parts or {})))


def wordpiece(*pieces: str, lowercase: bool = False, chinese: bool = True) -> Vocabulary:
    parts: dict[str, Any] = {
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "normalizer": {
            "type": "BertNormalizer", "lowercase": lowercase, "handle_chinese_chars": chinese,
        },
    }  # fmt: skip
    return of("WordPiece", list(pieces), ("[UNK]",), parts, unk_token="[UNK]")


def byte_level(*pieces: str) -> Vocabulary:
    return of("BPE", list(pieces), parts={"pre_tokenizer": {"type": "ByteLevel"}}, merges=[])


def metaspace(*pieces: str, **model: Any) -> Vocabulary:
    parts = {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}
    return of("Unigram", list(pieces), ("<unk>",), parts, **model)


def suffixed(*pieces: str, parts: Any = None) -> Vocabulary:
    return of("BPE", list(pieces), ("<unk>",), parts, merges=[], end_of_word_suffix="</w>")


def matches(teacher: Vocabulary, student: Vocabulary) -> dict[str, str]:
    found = VocabularyMap.between(teacher, student)
    return {
        token: student.tokens[found.match[number]]
        for number, token in enumerate(teacher.tokens)
        if found.match[number] >= 0 and not teacher.special[number]
    }


def splits(teacher: Vocabulary, student: Vocabulary) -> dict[str, list[str]]:
    found = VocabularyMap.between(teacher, student)
    return {
        token: [student.tokens[i] for i in found.split(number)] + ["?"] * int(found.unknown[number])
        for number, token in enumerate(teacher.tokens)
        if not teacher.special[number]
    }


def test_pieces_without_their_marks() -> None:
    def read(vocabulary: Vocabulary) -> list[tuple[bytes, bool]]:
        return [(piece.text, piece.begins) for piece in vocabulary.pieces]

    assert read(wordpiece("story", "##ry", "##"))[:3] == [
        (b"story", True),
        (b"ry", False),
        (b"##", True),
    ]
    assert read(byte_level("Ġstory", "story", "Ġ", "Ġdéj".replace("é", "Ã©"), "Ã", "Ċ")) == [
        (b"story", True),
        (b"story", False),
        (b"", True),
        ("déj".encode(), True),
        (b"\xc3", False),
        (b"\n", False),
    ]
    assert read(metaspace("▁story", "ry", "▁", "<0xC3>", byte_fallback=True))[:4] == [
        (b"story", True),
        (b"ry", False),
        (b"", True),
        (b"\xc3", False),
    ]


def test_same_pieces_across_marks() -> None:
    pieces = wordpiece("story", "##ry", "ry", ".", "##.", "猫")
    blanks = byte_level("Ġstory", "story", "ry", ".", "Ġ.", "çĮ«")
    assert matches(pieces, blanks) == {
        "story": "Ġstory", "##ry": "ry", ".": ".", "##.": ".", "猫": "çĮ«",
    }  # fmt: skip
    # WordPiece treats punctuation as a word of its own, whatever precedes it.
    assert matches(blanks, pieces) == {
        "Ġstory": "story", "ry": "##ry", ".": ".", "Ġ.": ".", "çĮ«": "猫",
    }  # fmt: skip
    assert matches(byte_level("."), wordpiece("##.", ".")) == {".": "."}
    # Without `handle_chinese_chars`, BERT treats 猫 like a letter.
    assert matches(blanks, wordpiece("猫", "##猫", chinese=False)) == {"çĮ«": "##猫"}
    assert matches(byte_level("A"), metaspace("<0x41>", "A", byte_fallback=True)) == {"A": "A"}
    assert matches(metaspace("▁story", "ry", "▁ry", "▁"), byte_level("Ġstory", "ry", "Ġ")) == {
        "▁story": "Ġstory", "ry": "ry", "▁": "Ġ",
    }  # fmt: skip
    assert matches(suffixed("story</w>", "sto", "."), pieces) == {"story</w>": "story", ".": "."}
    assert matches(pieces, suffixed("story</w>", "story", "ry</w>")) == {
        "story": "story</w>", "##ry": "ry</w>", "ry": "ry</w>",
    }  # fmt: skip


def test_the_maps_of_a_student_of_suffixes() -> None:
    """The maps give a suffix piece at the end of a word; isolated punctuation ends a word."""
    student = suffixed("story</w>", "story", ".</w>", ".", parts=BERT)
    teacher = byte_level("Ġstory", "story", ".")
    expected = ("story</w>", "story</w>", "story")
    for each, piece in zip(VocabularyMap.between(teacher, student).maps, expected, strict=True):
        assert [student.tokens[i] for i in each.match] == [piece, piece, ".</w>"]
    # The teacher's own end-of-word suffixes apply wherever they agree with the text.
    other = suffixed("story</w>", "story", parts=BERT)
    found = VocabularyMap.between(other, student)
    text, run = FlatText.of(["story"]), np.array([[0, 1]])
    for number in (0, 1):
        read, unlike = (Tokens.of([[each]], [[(0, 5)]], [[0]]) for each in (number, 1 - number))
        assert other.tokens[number] == student.tokens[number]
        assert maps_at(text, read, read, found, (run[:, 0], run)).tolist() == [0]
        assert maps_at(text, unlike, read, found, (run[:, 0], run)).tolist() == [1 + number]


def test_split_is_greedy_and_respects_the_start_of_words() -> None:
    teacher = wordpiece("story", "##story", "unstory.x", "зок")
    student = wordpiece("sto", "##ry", "##sto", "st", "##o", "s", "un", ".", "x", "##x")
    assert splits(teacher, student) == {
        "story": ["sto", "##ry"],
        "##story": ["##sto", "##ry"],
        "unstory.x": ["un", "##sto", "##ry", ".", "x"],
        "зок": ["[UNK]", "?"],
    }
    assert splits(teacher, byte_level("Ġsto", "sto", "ry", "Ġ", "un", ".", "x", "Ð", "·")) == {
        "story": ["Ġsto", "ry"],
        "##story": ["sto", "ry"],
        "unstory.x": ["Ġ", "un", "sto", "ry", ".", "x"],
        "зок": ["?"],
    }
    assert splits(teacher, suffixed("sto", "ry", "ry</w>", "r", "un", ".", "x</w>")) == {
        "story": ["sto", "ry</w>"],
        "##story": ["sto", "ry</w>"],
        "unstory.x": ["un", "sto", "ry", ".", "x</w>"],
        "зок": ["<unk>", "?"],
    }
    # The student has no piece that starts with a blank, so the blank is left out.
    assert splits(wordpiece("story"), byte_level("sto", "ry"))["story"] == ["sto", "ry"]


def test_bytes_that_are_no_characters() -> None:
    teacher = byte_level("Ã", "ĠÃ", "é", "Ã©")
    assert splits(teacher, byte_level("Ġ", "Ã", "©")) == {
        "Ã": ["Ã"], "ĠÃ": ["Ġ", "Ã"], "é": ["?"], "Ã©": ["Ã", "©"],
    }  # fmt: skip
    assert splits(teacher, wordpiece("é", "##é", "Ã"))["Ã"] == ["[UNK]", "?"]
    assert splits(teacher, wordpiece("é", "##é"))["Ã©"] == ["##é"]
    fallback = metaspace("▁", "<0xC3>", "<0xA9>", "<0xE9>", byte_fallback=True)
    assert splits(teacher, fallback) == {
        "Ã": ["<0xC3>"], "ĠÃ": ["▁", "<0xC3>"], "é": ["<0xE9>"], "Ã©": ["<0xC3>", "<0xA9>"],
    }  # fmt: skip


def test_the_students_normaliser_reads_the_teachers_piece() -> None:
    teacher = byte_level("ĠStory", "É".replace("É", "Ãī"), "ĠâĢĭ", "Ċ")
    student = wordpiece("story", "e", "##e", lowercase=True)
    assert splits(teacher, student) == {
        "ĠStory": ["story"], "Ãī": ["##e"], "ĠâĢĭ": [], "Ċ": [],
    }  # fmt: skip
    assert matches(teacher, student) == {"ĠStory": "story", "Ãī": "##e"}
    assert matches(teacher, wordpiece("story", lowercase=False)) == {}
    # A piece with a capital never occurs in a lower-casing vocabulary.
    lower = wordpiece("Story", "story", lowercase=True)
    assert matches(wordpiece("Story"), lower) == {"Story": "story"}


def test_special_tokens_by_role_and_by_name() -> None:
    teacher, student = vocabulary("wordpiece"), vocabulary("unigram")
    assert set(teacher.roles) == {"cls", "sep", "mask", "pad", "unk"}
    found = vocabulary_map("wordpiece", "unigram")
    names = {
        "[CLS]": "<s>",
        "[SEP]": "</s>",
        "[MASK]": "<mask>",
        "[PAD]": "<pad>",
        "[UNK]": "<unk>",
    }
    for own, name in names.items():
        number = teacher.tokens.index(own)
        assert student.tokens[found.match[number]] == name
        assert found.split(number).tolist() == [student.tokens.index(name)]
        assert not found.unknown[number]
    extra = of("WordPiece", ["a", "[unk]", "[x]"], ("[unk]", "[x]", "[y]"), unk_token="[unk]")
    other = of("WordPiece", ["[x]", "[unk]"], ("[x]", "[unk]"), unk_token="[unk]")
    assert VocabularyMap.between(extra, other).match.tolist() == [-1, 1, 0, -1]
    assert VocabularyMap.between(extra, other).unknown.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    "processor",
    [
        {"type": "BertProcessing", "sep": ["(s)", 1], "cls": ["(c)", 0]},
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "(c)", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "(s)", "type_id": 0}},
                {},  # only in a forged file
            ],
        },
    ],
)
def test_roles_from_the_post_processor(processor: dict[str, Any]) -> None:
    parts = {"post_processor": {"type": "Sequence", "processors": [processor]}}
    found = of("WordPiece", ["(c)", "(s)", "a"], ("[MASK]",), parts, unk_token="?")
    assert found.roles == {"cls": 0, "sep": 1, "mask": 3}
    assert found.special.tolist() == [True, True, False, True]


def test_added_words_are_literal_text() -> None:
    teacher = of("WordPiece", ["a"], ("C++", "[UNK]"), unk_token="[UNK]")
    assert splits(teacher, byte_level("C", "+", "Ġ"))["C++"] == ["C", "+", "+"]
    assert matches(teacher, wordpiece("C++")) == {"C++": "C++"}


def test_a_file_without_types_is_read() -> None:
    content = json.loads(tokenizer("wordpiece").to_str())
    del content["model"]["type"]
    assert (
        Vocabulary.from_tokenizer_json(json.dumps(content)).tokens == vocabulary("wordpiece").tokens
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a tokenizer's file"),
        ("[]", "not a tokenizer's file"),
        ('{"version": "1.0"}', "not a tokenizer's file .*model"),
        (
            '{"model": {"type": "Unigram", "vocab": [], "unk_id": 3}}',
            "a tokenizer's file .*IndexError",
        ),
        ('{"model": {"type": "Magic", "vocab": {}}}', "model: unknown type 'Magic'"),
        (
            '{"normalizer": {"type": "Odd"}, "model": {"type": "BPE", "vocab": {}}}',
            "normalizer: unknown type 'Odd'",
        ),
        ('{"model": {"type": "BPE", "vocab": {"a": -1, "b": 0}}}', "from 0 to 16,777,215, got -1"),
        ('{"model": {"type": "BPE", "vocab": {"a": 1000000000000}}}', "got 1,000,000,000,000"),
        ("[" * 100_000, "a tokenizer's file .*RecursionError"),
        (
            '{"normalizer": {"type": "Replace", "pattern": {"Regex": "a{99999999999999}"},'
            ' "content": ""}, "model": {"type": "BPE", "vocab": {}}}',
            "a tokenizer's file .*OverflowError",
        ),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        Vocabulary.from_tokenizer_json(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_maps_to_itself_by_identity(kind: str) -> None:
    found = vocabulary_map(kind, kind)
    everything = list(range(len(vocabulary(kind))))
    assert found.match.tolist() == found.split_ids.tolist() == everything
    assert not found.unknown.any()


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_split_spells_the_teachers_piece(kinds: tuple[str, str]) -> None:
    teacher, student = map(vocabulary, kinds)
    found, normalise = vocabulary_map(*kinds), normaliser_of(student.normaliser)
    for number, piece in enumerate(teacher.pieces):
        if teacher.special[number] or found.unknown[number]:
            continue
        spelled = b"".join(student.pieces[i].text for i in found.split(number))
        try:
            expected = normalise(piece.text.decode()).encode()
        except UnicodeDecodeError:
            expected = piece.text
        assert b"".join(spelled.split()) == b"".join(expected.split())


@pytest.mark.parametrize("teacher", KINDS)
@pytest.mark.parametrize("student", ["wordpiece", "wordpiece-lower"])
def test_words_split_as_wordpiece_itself_splits_them(teacher: str, student: str) -> None:
    found, built = vocabulary_map(teacher, student), tokenizer(student)
    compared = 0
    for number, piece in enumerate(vocabulary(teacher).pieces):
        text = piece.text.decode(errors="replace")
        if vocabulary(teacher).special[number] or not (piece.begins and text.isalpha()):
            continue
        expected = built.encode(text, add_special_tokens=False).ids
        assert found.split(number).tolist() == expected
        compared += 1
    assert compared > 20


NORMALISERS = {
    "bert": normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=False),
    "bert-cased": normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False),
    "bert-accents": normalizers.BertNormalizer(
        lowercase=True, strip_accents=False, handle_chinese_chars=False
    ),
    "bert-raw": normalizers.BertNormalizer(
        clean_text=False, lowercase=False, strip_accents=True, handle_chinese_chars=False
    ),
    "albert": normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    ),
    "electra": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "regex": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("[éa]+"), "o")]),
    "nfkc": normalizers.NFKC(),
}
WRITTEN = st.lists(st.sampled_from([*FRAGMENTS, "``", "ÀÉ", "ΑΣ", "Å"]), max_size=8).map("".join)


@pytest.mark.parametrize("name", NORMALISERS)
@given(text=WRITTEN)
@settings(max_examples=80, deadline=None)
def test_normalisers_do_what_tokenizers_does(name: str, text: str) -> None:
    holder = Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    holder.normalizer = NORMALISERS[name]
    ours = normaliser_of(json.loads(holder.to_str())["normalizer"])
    assert ours(text) == NORMALISERS[name].normalize_str(text)


def test_normalisers_of_marks_and_compiled_tables() -> None:
    marks = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ],
    }
    assert normaliser_of(marks)(" a b ") == " a b "
    assert normaliser_of({"type": "Precompiled"})("ﬁ\u0007\n½") == "fi 1⁄2"
    with pytest.raises(AlignmentError, match=r"cannot compile the expression '\\\\p"):
        normaliser_of({"type": "Replace", "pattern": {"Regex": "\\p{L}"}, "content": ""})
