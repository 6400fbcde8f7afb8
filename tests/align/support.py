"""Small real tokenizers, texts with difficult characters, and slow plain-Python references."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from teachonce.align import Alignment, FlatText, Tokens, Vocabulary, VocabularyMap
from teachonce.align.text import BLANK, SOLID, character_class
from teachonce.support.arrays import ranges

SENTENCES = (
    "A story is told again and again; the teller told the story to another teller.",
    "The student learned from the teacher, and the teachers learned from the students.",
    "Ученик учился у учителя, а учитель учился у своих учеников. Новая история!",
    "Старый учитель рассказывал историю: её слушали все ученики (и ёжик).",
    "Žiak sa učil od učiteľa a učiteľ sa učil od svojich žiakov. Nový príbeh?",
    "Vŕba, dážď, ľad a kôň; cafe\u0301 a café, e\u0301\u0323 tiež.",
    "Emoji 🙂 👍🏽 👩‍👩‍👧 🇸🇰 ❤️ and 猫が好き, 老灯塔。 «Да», — сказал он.",
    "Numbers 1,204 and 3.14 — “quoted” it's well-known naïve İstanbul straße ﬁne ½",
    "a\tb\nc  d\u00a0e soft\u00adhyphen zero\u200bwidth x=[1];y=2 # [MASK] <mask>",
)
KINDS = ("wordpiece", "wordpiece-lower", "bpe", "bpe-untrimmed", "unigram")
PAIRS = tuple((teacher, student) for teacher in KINDS for student in KINDS)
BLANK_KINDS = ("bpe", "bpe-prefix", "unigram", "unigram-first", "unigram-never")
FRAGMENTS = (
    *(" ", "  ", "\n", "\t", "\u00a0", "\u3000", ".", ",", "...", "(", "—", "'s", "1887"),
    *("▁", "Ġ", "##", "[MASK]", "<mask>", "[UNK]"),
    *("\u0000", "\u0007", "\u00ad", "\u200b", "\u200d", "\ufe0f", "\ufeff", "\ufffd", "\ue000"),
    *("\u0301", "e\u0301\u0323", "é", "й", "и\u0306", "ľ", "İ", "ß", "ﬁ", "½", "Σ", "ς", "ǅ"),
    *("🙂", "👍🏽", "👩‍👩‍👧", "🇸🇰", "❤️", "猫", "が", "か\u3099", "한", "ह", "ि"),
    *("story", "Story", "teacher", "ученик", "Учителя", "žiak", "učiteľ", "a", "в", "😀x"),
)  # fmt: skip
TEXT = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.sampled_from(" ".join(SENTENCES).split()).map(lambda word: word + " "),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=12,
).map("".join)
TEXTS = st.lists(TEXT, min_size=1, max_size=4)


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return a trained tokenizer that adds cls and sep. It has 400 pieces, so words are split."""
    wordpiece = kind.startswith("wordpiece")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if wordpiece else []
    names = names or ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    common: dict[str, Any] = {"vocab_size": 400, "special_tokens": names, "show_progress": False}
    if wordpiece:
        built = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        if kind != "wordpiece-bare":
            built.normalizer = normalizers.BertNormalizer(lowercase=kind == "wordpiece-lower")
        if kind == "wordpiece-runs":
            built.pre_tokenizer = pre_tokenizers.Whitespace()
        else:
            built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(**common)
    elif kind.startswith("unigram"):
        scheme: Any = kind.partition("-")[2]
        built = Tokenizer(models.Unigram())
        built.normalizer = normalizers.NFKC()
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme or "always")
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common)
    elif kind == "bpe-ends":
        built = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.BpeTrainer(end_of_word_suffix="</w>", **common)
    else:
        built = Tokenizer(models.BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bpe-prefix")
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    built.train_from_iterator(SENTENCES, trainer)
    cls, sep = (names[2], names[3]) if wordpiece else (names[0], names[2])
    specials = [(token, built.token_to_id(token)) for token in (cls, sep)]
    template = processors.TemplateProcessing(single=f"{cls} $A {sep}", special_tokens=specials)
    if kind.startswith("bpe") and kind != "bpe-ends":
        trim = processors.ByteLevel(trim_offsets=kind != "bpe-untrimmed")
        built.post_processor = processors.Sequence([trim, template])
    else:
        built.post_processor = template
    return built


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary.from_tokenizer_json(tokenizer(kind).to_str())


@cache
def vocabulary_map(teacher: str, student: str) -> VocabularyMap:
    return VocabularyMap.between(vocabulary(teacher), vocabulary(student))


def tokens_of(encodings: Sequence[Any]) -> Tokens:
    """Return the tokens of encodings of the library `tokenizers`."""
    fields = ("ids", "offsets", "special_tokens_mask")
    return Tokens.of(*([getattr(each, name) for each in encodings] for name in fields))


def encode(kind: str, texts: Sequence[str], max_length: int | None = None) -> Tokens:
    encodings = tokenizer(kind).encode_batch(list(texts))
    if max_length is not None:
        for encoding in encodings:
            encoding.truncate(max_length)
    return tokens_of(encodings)


def plain_tokens(*sequences: Sequence[tuple[int, int]], special: Sequence[int] = ()) -> Tokens:
    """Return tokens with these spans; ids count from 0, and `special` lists flat special tokens."""
    spans = [list(sequence) for sequence in sequences]
    numbers = iter(range(sum(map(len, spans))))
    ids = [[next(numbers) for _ in sequence] for sequence in spans]
    flags = [[number in special for number in sequence] for sequence in ids]
    return Tokens.of(ids, spans, flags)


def pairs(alignment: Alignment) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    both = zip(alignment.teacher.tolist(), alignment.student.tolist(), strict=True)
    return [((a, b), (c, d)) for (a, b), (c, d) in both]


def trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    kept = [i for i in range(begin, end) if character_class(text[i]) != BLANK]
    return (kept[0], kept[-1] + 1) if kept else (begin, end)


def spans_of(text: str, tokens: Tokens, sequence: int) -> dict[int, tuple[int, int]]:
    """Map each flat token of a sequence to its trimmed span, if it covers characters."""
    return {
        token: trimmed(text, *map(int, tokens.offsets[token]))
        for token in range(int(tokens.start[sequence]), int(tokens.start[sequence + 1]))
        if not tokens.special[token] and tokens.offsets[token, 0] < tokens.offsets[token, 1]
    }


def solid_characters(text: str, spans: Sequence[tuple[int, int]]) -> set[int]:
    covered = {i for begin, end in spans for i in range(begin, end)}
    return {i for i in covered if character_class(text[i]) == SOLID}


def reference_span(
    texts: Sequence[str], teacher: Tokens, student: Tokens
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Compute `align_span` by its definition: try every cut and every token of each sequence."""
    found = []
    for sequence, text in enumerate(texts):
        sides = [spans_of(text, tokens, sequence) for tokens in (teacher, student)]
        spans = [span for side in sides for span in side.values()]
        cuts = [c for c in range(len(text) + 1) if not any(b < c < e for b, e in spans)]
        for low, high in zip(cuts, cuts[1:], strict=False):
            inside = [
                {t: span for t, span in side.items() if low <= span[0] and span[1] <= high}
                for side in sides
            ]
            covered = [solid_characters(text, list(side.values())) for side in inside]
            if all(inside) and covered[0] == covered[1]:
                runs = [(min(side), max(side) + 1) for side in inside]
                if not any(
                    tokens.special[first:last].any()
                    for tokens, (first, last) in zip((teacher, student), runs, strict=True)
                ):
                    found.append((runs[0], runs[1]))
    return found


def check_laws(text: FlatText, teacher: Tokens, student: Tokens, found: Alignment) -> None:
    """Check that runs ascend, do not overlap, hold no special token, and cover equal characters of
    one sequence."""
    covered, sequences = [], []
    for runs, tokens in ((found.teacher, teacher), (found.student, student)):
        flat = runs.astype(np.int64).reshape(-1)
        assert (np.diff(flat) >= 0).all() and (runs[:, 0] < runs[:, 1]).all()
        sizes = runs[:, 1] - runs[:, 0]
        run = np.repeat(np.arange(len(runs)), sizes)
        token = ranges(runs[:, 0], sizes)
        assert not tokens.special[token].any()
        sequence = np.searchsorted(tokens.start, token, "right") - 1
        assert (np.diff(sequence)[np.diff(run) == 0] == 0).all()
        sequences.append(np.searchsorted(tokens.start, runs[:, 0], "right"))
        shift = text.start[sequence]
        begin, end = (tokens.offsets[token, i].astype(np.int64) + shift for i in (0, 1))
        of_character = np.full(len(text.codepoints), -1)
        of_character[ranges(begin, end - begin)] = np.repeat(run, end - begin)
        covered.append(of_character[text.solid])
    for one, other in (covered, sequences):
        assert np.array_equal(one, other)


def same_arrays(a: Alignment, b: Alignment) -> bool:
    return np.array_equal(a.teacher, b.teacher) and np.array_equal(a.student, b.student)
