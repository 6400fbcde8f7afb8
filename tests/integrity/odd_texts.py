"""Unusual texts of every kind, processed by corpus, windows, store and alignment."""

import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from teachonce.align import (
    FlatText,
    Tokens,
    Vocabulary,
    VocabularyMap,
    align_match,
    align_reduce,
    align_span,
)
from teachonce.align.vocabulary import byte_of_character
from teachonce.store import Features, FeatureStore, StoreWriter, open_store
from teachonce.store.tools.verify import verify
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.parts import sequences_of
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.masked_views import mask_spans
from teachonce.teacher_dump.windows.window import Window
from tests.align.support import check_laws, tokens_of
from tests.making.texts import SENTENCES

KINDS = ("wordpiece", "bpe", "unigram")
MAX_LENGTH = 48
SEQUENCES = 2000  # in a part
HUGE = 1_000_000
AT_ONCE = 64
ODD = (
    "\0", "\x07", "\x1b[31m", "\x7f", "\x85", "\r", "\r\n", "\n", "\t", "\v", "\f", " ", "\u00a0",
    "\u2028", "\u2029", "\u3000", "\u00ad", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff",
    "\u200e", "\u200f", "\u202a", "\u202e", "\u2066", "\u2069", "\u061c", "\ufe0f", "\ufffd",
    "\uffff", "\U0010ffff", "\ud800", "\udfff", "\ud83d\ude00", "\u0301", "\u0323\u0301",
    "\u0327" * 30, "שלום", "مرحبا", "ܫܠܡܐ", "नमस्ते", "ไทย", "각", "각", "Å", "ﬁ", "ﷺ", "İ", "ς",
    "ẞ", "👩‍👩‍👧‍👦", "🇸🇰", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "𝔘𝔫𝔦", "漢字", "かが", "½", "٣", "[SEP]", "[MASK]", "[UNK]",
    "<s>", "<mask>", "<unk>", "##", "##ing", "▁", "Ġ", "don't", "a_b", "...", "—", "“", "://",
)  # fmt: skip
SCRIPTS = ((0x590, 0x800), (0x900, 0x1000), (0x1100, 0x1200), (0x2000, 0x2100), (0x3040, 0x3100),
           (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFB00, 0xFE00), (0x1F300, 0x1FA00))  # fmt: skip
FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


def odd_text(chance: random.Random) -> str:
    """Draw a short text of one of several kinds; some are long enough for many windows."""
    kind = chance.randrange(8)
    length = chance.choice([0, 1, 2, 5, 10, 20]) if chance.randrange(50) else 400
    if kind == 0:
        return "".join(chr(chance.randrange(0x110000)) for _ in range(length))
    if kind == 1:
        low, high = chance.choice(SCRIPTS)
        return "".join(chr(chance.randrange(low, high)) for _ in range(length))
    if kind == 2:
        return "".join(chr(chance.choice([*range(32), *range(127, 160)])) for _ in range(length))
    if kind == 3:
        return unicodedata.normalize(chance.choice(FORMS), chance.choice(SENTENCES))
    if kind == 4:
        return chance.choice(["x", "é", "ж", "\u200d", "漢", "e\u0301"]) * (1 + 4 * length)
    glue = chance.choice(["", " ", "\r\n", "\u3000"])
    words = " ".join(SENTENCES).split()
    return glue.join(chance.choice(words if chance.randrange(2) else ODD) for _ in range(length))


def odd_texts(seed: int, count: int) -> Iterator[str]:
    """Draw texts by seed. One in 20,000 is a word of a million characters."""
    chance = random.Random(seed)
    for number in range(count):
        if number % 20_000 == 10_000:
            yield chance.choice("xжé漢") * HUGE
        else:
            yield odd_text(chance)


def characters(end: int = 0x110000) -> Iterator[str]:
    """Return every code point up to `end`, surrogates included, AT_ONCE in a text."""
    for begin in range(0, end, AT_ONCE):
        yield "".join(map(chr, range(begin, min(begin + AT_ONCE, end))))


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Write a .jsonl file: its escapes can represent characters that UTF-8 cannot."""
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            escaped = re.search("[\ud800-\udfff]", text) is not None
            file.write(json.dumps({"text": text}, ensure_ascii=escaped) + "\n")
    return path


def run(
    texts: Sequence[str], folder: Path, tokenizers: dict[str, Any], teachers: Sequence[str] = KINDS
) -> Counter[str]:
    """Process all texts in full, with each of `teachers` as the teacher's tokenizer.

    Raises AssertionError if a law is violated; returns counts of the checks.
    """
    for tokenizer in tokenizers.values():  # whatever earlier callers have set
        tokenizer.backend_tokenizer.no_truncation()
    counts = Counter[str]({"texts": len(texts)})
    path = write_corpus(folder / "odd.jsonl", texts)
    # two halves that become adjacent are one
    joined = [json.loads(json.dumps(text)) for text in texts]
    kept = [re.sub("[\ud800-\udfff]", "\ufffd", text) for text in joined if text.strip()]
    for kind in teachers:
        tokenizer = tokenizers[kind]
        corpus = Corpus.open([str(path)])
        windows = list(iter_windows(corpus, tokenizer, MAX_LENGTH))
        assert corpus.documents == len(kept)
        check_documents(kept, windows, tokenizer)
        for number, begin in enumerate(range(0, len(windows), SEQUENCES)):
            part = windows[begin : begin + SEQUENCES]
            read = through_store(part, folder / f"{kind}-{number}.zarr", tokenizer)
            check_slices(kind, *read, tokenizer)
            check_alignments(kind, *read, tokenizers)
            counts["windows"] += len(part)
            counts["tokens"] += sum(len(window.ids) for window in part)
    return counts


def check_documents(documents: list[str], windows: list[Window], tokenizer: Any) -> None:
    """Check that windows cover their documents and that omitted text has no token."""
    of_document = defaultdict(list)
    for each in windows:
        of_document[each.document].append(each)
    for number, text in enumerate(documents):
        place = 0
        ends: list[Window | None] = [*of_document[number], None]
        for window in ends:
            begin = len(text) if window is None else window.document_begin
            gap = text[place:begin]
            assert begin >= place, f"document {number}: windows overlap"
            if gap:
                assert not tokenizer(gap, add_special_tokens=False)["input_ids"], repr(gap[:80])
            if window is not None:
                assert text.startswith(window.text, begin), f"document {number} at {begin}"
                assert len(window.ids) <= MAX_LENGTH
                place = begin + len(window.text)


def through_store(windows: list[Window], path: Path, tokenizer: Any) -> tuple[list[str], Tokens]:
    """Write, seal and verify a store (which tokenizes every text again), and read it unchanged."""
    features = Features(views=2, max_length=MAX_LENGTH, vocabulary=len(tokenizer))
    writer = StoreWriter.create_or_resume(
        path,
        identity={"corpus": "odd"},
        features=features,
        files={"tokenizer.json": tokenizer.backend_tokenizer.to_str().encode()},
    )
    part = writer.part(0, [len(window.ids) for window in windows])
    part.set_sequences(sequences_of(windows, features))
    spans = [mask_spans(window.text, 0, 1, i) for i, window in enumerate(windows)]
    part.set_masks(1, spans)
    writer.publish(part)
    writer.seal()
    found = verify(path).problems
    assert found == [], found[:3]
    store = open_store(path)
    (batch,) = store.stream(batch_tokens=2**40, shuffle=False, view=1)
    order = np.argsort(batch.index)
    assert [batch.texts[i] for i in order] == [window.text for window in windows]
    for index in np.unique(np.linspace(0, len(windows) - 1, 9).astype(int)):
        record, window = store[int(index)], windows[index]
        assert record.text == window.text and np.array_equal(record.token_ids, window.ids)
        assert np.array_equal(record.offsets, window.offsets)
        assert np.array_equal(record.views[1].spans, spans[index])
    texts, tokens = _tokens(store)
    assert texts == [window.text for window in windows]
    assert np.array_equal(tokens.ids, np.concatenate([window.ids for window in windows]))
    return texts, tokens


def _tokens(store: FeatureStore) -> tuple[list[str], Tokens]:
    part, counts = store.part(0), store.part(0).part.counts
    ids, begin, end, special = (part.all(f"token/{k}") for k in ("id", "begin", "end", "special"))
    tokens = Tokens(ids, np.stack([begin, end], axis=1), special, part.token_start)
    return part.texts(0, counts.sequences), tokens


def _spelt(piece: str, special: bool) -> bytes:
    return piece.encode() if special else bytes(byte_of_character()[each] for each in piece)


def check_slices(kind: str, texts: list[str], tokens: Tokens, tokenizer: Any) -> None:
    """Check that the slice of a token, normalised, equals the text of the token."""
    backend, known = tokenizer.backend_tokenizer, set[tuple[str, str]]()
    added = set(tokenizer.all_special_tokens)
    pieces = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    spans, special = tokens.offsets.tolist(), tokens.special.tolist()
    for text, (first, last) in zip(texts, pairwise(tokens.start.tolist()), strict=True):
        ordinary = [i for i in range(first, last) if not special[i]]
        if kind == "bpe":  # all bytes of the text, in order, in the tokens
            spelt = b"".join(_spelt(pieces[i], pieces[i] in added) for i in ordinary)
            assert spelt == text.encode(), repr(text[:80])
        for i in ordinary:
            pair = (pieces[i], text[slice(*_cluster(kind, text, *spans[i]))])
            if pair not in known and pieces[i] != tokenizer.unk_token:
                known.add(pair)
                assert _covers(kind, backend, *pair, pieces[i] in added), pair


def _cluster(kind: str, text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the slice extended by letters and marks that may be composed into it (NFKC)."""
    if kind == "unigram":
        while begin and _composes(text[begin]):
            begin -= 1
        while end < len(text) and _composes(text[end]):
            end += 1
    return begin, end


def _composes(character: str) -> bool:
    jamo = "\u1160" <= character <= "\u11ff"
    return jamo or unicodedata.category(character)[0] == "M"


def _covers(kind: str, backend: Any, token: str, slice_: str, added: bool) -> bool:
    if added:
        return token in slice_
    if kind == "bpe":
        return _spelt(token, False) in slice_.encode()
    normal: str = backend.normalizer.normalize_str(slice_)
    if kind == "unigram":  # one character may be several pieces: (fi) is f, i
        return token.replace("▁", "") in normal.replace(" ", "").replace("▁", "")
    return token.removeprefix("##") == normal.strip() or token == normal.strip()


@cache
def _vocabulary_map(teacher: str, student: str) -> VocabularyMap:
    return VocabularyMap.between(
        Vocabulary.from_tokenizer_json(teacher), Vocabulary.from_tokenizer_json(student)
    )


def check_alignments(
    kind: str, texts: list[str], teacher: Tokens, tokenizers: dict[str, Any]
) -> None:
    """Check the laws of every alignment with every tokenizer, including its own."""
    text = FlatText.of(texts)
    same = align_span(text, teacher, teacher)
    assert np.array_equal(same.teacher, same.student)
    for tokenizer in tokenizers.values():
        backend = tokenizer.backend_tokenizer
        student = tokens_of(backend.encode_batch(texts))
        jsons = (tokenizers[kind].backend_tokenizer.to_str(), backend.to_str())
        vocabulary = _vocabulary_map(*jsons)
        span = align_span(text, teacher, student)
        check_laws(text, teacher, student, span)
        swapped = align_span(text, student, teacher).swap()
        assert np.array_equal(swapped.teacher, span.teacher)
        assert np.array_equal(swapped.student, span.student)
        match = align_match(text, teacher, student, vocabulary)
        check_laws(text, teacher, student, match)
        reduced = align_reduce(teacher, vocabulary)
        check_laws(text, teacher, reduced.tokens, reduced.alignment)
