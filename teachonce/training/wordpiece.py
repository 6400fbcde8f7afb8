"""Train vocabularies of WordPieces or whole words, for students and for dumps."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice, repeat
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from teachonce.support.errors import UserError
from teachonce.support.parsing import DIGITS

SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
SIZES = (5000, 10_000, 20_000, 30_000)
SAMPLE = 20_000  # texts of which the words are counted for a suggestion
PRIVATE = 0xF0000  # code points that no text uses; there are more than Unicode has letters


def vocabulary_size(word: str) -> int | None:
    """Return the number of pieces that a `--vocab` such as `5k` or `5000` requests; None if `word`
    is not a number."""
    match = re.fullmatch(f"({DIGITS})(k?)", word.lower())
    return int(match[1]) * (1000 if match[2] else 1) if match else None


def check_masking_tokenizer(tokenizer: Any, word: str) -> None:
    """Raise UserError unless a student can have this tokenizer of `--vocab`."""
    if not tokenizer.is_fast or None in (tokenizer.mask_token_id, tokenizer.pad_token_id):
        raise UserError(
            f"--vocab {word}: a student needs a fast tokenizer (tokenizer.json) with a mask and a"
            " padding token; give a size such as 5k"
        )


def fewer_pieces(word: str, pieces: int) -> str:
    """Return a line if a vocabulary has fewer pieces than `--vocab` requested, else "".

    `5k`, `words:5k` and `pruned:5k` request a number.
    """
    requested = vocabulary_size(word.rpartition(":")[2])
    if requested is None or pieces >= requested:
        return ""
    return (
        f"vocabulary of {pieces:,} pieces, not {requested:,} (--vocab {word}): the text has no more"
        " pieces"
    )


def train_wordpiece(
    texts: Iterable[str], size: int, teacher_normalizer: Any, characters: str = ""
) -> Tokenizer:
    """Train a WordPiece vocabulary of `size` pieces that normalizes case and accents as the teacher
    does.

    It has a piece for every character of the text. If the text is small, it has fewer pieces than
    `size`; `fewer_pieces` reports that. characters: further characters to include, if at least half
    of the pieces remain for others. Raises UserError if `size` is too small for the special tokens
    and the characters, each at the start of a word and inside one.
    """
    tokenizer = _untrained(teacher_normalizer)
    words = _count_words(texts, tokenizer)
    letters = _letters(words)
    # Each character at the start of a word, and inside a word.
    text = " ".join([*characters, *(f"{char}{char}" for char in characters)])
    all_letters = _letters([*words, *_count_words([text], tokenizer)])
    if len(SPECIALS) + len(all_letters) <= size / 2:
        letters = all_letters
    needed = len(SPECIALS) + len(letters)
    if size < needed:
        raise UserError(
            f"--vocab {size}: the text has {len({c for word in words for c in word})} different"
            " characters, which, with their forms inside words and the special tokens, need"
            f" {needed} pieces; give more"
        )
    possible = len(letters) + sum(len(word) - 1 for word in words)  # each merge joins two pieces
    # At most the possible number: the trainer allocates memory for the number requested.
    pieces = [*SPECIALS.values(), *_merged(words, letters, min(size - len(SPECIALS), possible))]
    tokenizer.model = models.WordPiece(_numbered(pieces), unk_token="[UNK]")
    _frame(tokenizer)
    return tokenizer


def word_vocabulary(texts: Iterable[str], size: int | None) -> Tokenizer:
    """Make a vocabulary of lower-cased words, split at white space (Mukherjee & Awadallah 2019,
    section 6).

    size: number of entries, special tokens included; None: all words. The most frequent words are
        chosen. Raises UserError if `size` leaves no room for a word.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counts = _count_words(texts, tokenizer)
    # Words of equal count by the alphabet, so that the order of the texts decides nothing.
    entries = sorted(counts.keys() - SPECIALS.values(), key=lambda word: (-counts[word], word))
    least = len(SPECIALS) + 1
    if size is not None and size < least:
        raise UserError(
            f"--vocab words:{size}: leaves no room for words after the special tokens; give {least}"
            " or more, or for all words of the text: --vocab words"
        )
    pieces = [*SPECIALS.values(), *entries][:size]
    tokenizer.model = models.WordLevel(_numbered(pieces), unk_token="[UNK]")
    _frame(tokenizer)
    return tokenizer


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def _frame(tokenizer: Tokenizer) -> None:
    """Make a tokenizer add [CLS] and [SEP] around a text."""
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS.values()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )


def suggested_size(texts: Iterable[str], teacher_normalizer: Any) -> int:
    """Suggest the smallest of SIZES in which at most half of the pieces are single characters;
    reads SAMPLE texts.

    `train_wordpiece` makes fewer pieces if the text is too small for that size.
    """
    words = _count_words(islice(texts, SAMPLE), _untrained(teacher_normalizer))
    needed = len(SPECIALS) + len(_letters(words))
    return next((size for size in SIZES if size >= 2 * needed), SIZES[-1])


def _untrained(teacher_normalizer: Any) -> Tokenizer:
    lower, strip = _folding(teacher_normalizer)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _letters(words: Iterable[str]) -> list[str]:
    """Return the pieces of single characters: each at the start of a word, then each that occurs
    inside a word, with `##`."""
    inside = {c for word in words for c in word[1:]}
    return [*sorted({c for word in words for c in word}), *(f"##{c}" for c in sorted(inside))]


def _merged(words: Counter[str], letters: list[str], size: int) -> list[str]:
    """Return at most `size` pieces of the words: the letters, then the results of byte-pair
    merges."""
    # The trainer of WordPiece itself numbers the letters inside words by a hash table that is
    # random in every process, and breaks ties by these numbers: other runs, other pieces. So every
    # letter, first or inside (`##`), becomes a character of its own before a trainer sees it.
    code = {letter: chr(PRIVATE + i) for i, letter in enumerate(letters)}
    # Sorted words, so that the order of the texts decides nothing.
    coded = (
        (code[word[0]] + "".join(code[f"##{c}"] for c in word[1:]), count)
        for word, count in sorted(words.items())
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(
        # The trainer takes texts and counts words itself, so that each word comes as often as in
        # the text.
        chain.from_iterable(repeat(word, count) for word, count in coded),
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=list(code.values()),
            min_frequency=2,
            show_progress=False,
        ),
    )
    ids = tokenizer.get_vocab()
    runs = ([letters[ord(c) - PRIVATE] for c in run] for run in sorted(ids, key=ids.__getitem__))
    return [run[0] + "".join(c[2:] for c in run[1:]) for run in runs]


def _folding(normalizer: Any) -> tuple[bool, bool]:
    """Return whether the teacher lower-cases and whether it drops accents, found by applying its
    normalizer."""
    if normalizer is None:
        return False, False
    # Some normalizers decompose é but retain its accent, and SentencePiece's put ▁ before a text.
    folded = [unicodedata.normalize("NFC", normalizer.normalize_str(c).strip("▁ ")) for c in "Aé"]
    return folded[0] == "a", folded[1] == "e"


def _count_words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    words: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return words
