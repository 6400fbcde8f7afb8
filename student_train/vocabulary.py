"""The student's vocabulary: WordPiece trained on the store's own text, a tokenizer folder, or the
teacher's."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
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
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from store import FeatureStore
from store.errors import UserError, first_line

SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
PRIVATE = 0xF0000  # code points that no text uses; there are more than Unicode has letters


def vocabulary_size(word: str) -> int | None:
    """Number of pieces that `5k` or `5000` asks for; None where the word is no number."""
    found = re.fullmatch(r"(\d+)(k?)", word.lower())
    return int(found[1]) * (1000 if found[2] else 1) if found else None


def student_tokenizer(word: str, store: FeatureStore) -> PreTrainedTokenizerFast:
    """The tokenizer that `--vocab` asks for.

    Raises UserError if the size is impossible for the store's text, or the folder holds no fast
    tokenizer.
    """
    size = vocabulary_size(word)
    if size is not None:
        return train_wordpiece(store.texts(), size, store.tokenizer().normalizer)
    if word == "teacher":
        return teacher_tokenizer(store)
    if not Path(word).is_dir():
        raise UserError(
            f"--vocab {word}: expected a size (5k, 8000), a folder with a tokenizer, or teacher"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(word, trust_remote_code=False)
    except Exception as error:  # of many libraries, which raise what they like for a bad file
        raise UserError(
            f"--vocab {word}: no tokenizer can be loaded from it ({first_line(error).rstrip(' :')})"
            "; give a folder that save_pretrained of a tokenizer wrote, or a size such as 5k"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"--vocab {word}: its tokenizer has special tokens only, as tokenizer.json or the"
            " vocabulary is missing or empty; save the tokenizer there, or give a size such as 5k"
        )
    return _checked(tokenizer, word)


def teacher_tokenizer(store: FeatureStore) -> PreTrainedTokenizerFast:
    """The teacher's own tokenizer, from the store alone."""
    settings: dict[str, Any] = json.loads(store.teacher_file("tokenizer_config.json"))
    names = [name for name in (*SPECIALS, "bos_token", "eos_token") if name in settings]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=store.tokenizer(),
        model_max_length=settings["model_max_length"],
        **{name: settings[name] for name in names},
    )
    return _checked(tokenizer, "teacher")


def _checked(tokenizer: Any, word: str) -> PreTrainedTokenizerFast:
    if not tokenizer.is_fast or None in (tokenizer.mask_token_id, tokenizer.pad_token_id):
        raise UserError(
            f"--vocab {word}: a student needs a fast tokenizer (tokenizer.json) with a mask and a"
            " padding token; give a size such as 5k"
        )
    return tokenizer


def train_wordpiece(
    texts: Iterable[str], size: int, teacher_normalizer: Any
) -> PreTrainedTokenizerFast:
    """WordPiece of exactly `size` pieces that folds case and accents as the teacher does and knows
    every character.

    Raises UserError if `size` cannot hold the single characters of the text, or the text has fewer
    pieces to give.
    """
    lower, strip = _folding(teacher_normalizer)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    words = _count_words(texts, tokenizer)
    characters = {c for word in words for c in word}
    inside = {c for word in words for c in word[1:]}
    needed = len(SPECIALS) + len(characters) + len(inside)
    if size < needed:
        raise UserError(
            f"--vocab {size}: the text has {len(characters)} different characters, and with those"
            f" inside words and the special tokens they need {needed} pieces; ask for more"
        )
    letters = [*sorted(characters), *(f"##{c}" for c in sorted(inside))]
    possible = len(letters) + sum(len(word) - 1 for word in words)  # each merge joins two pieces
    # Never more than there can be: the trainer sets memory aside for what it is asked for.
    pieces = [*SPECIALS.values(), *_merged(words, letters, min(size - len(SPECIALS), possible))]
    if len(pieces) < size:
        raise UserError(
            f"--vocab {size}: the text gives only {len(pieces)} pieces; ask for at"
            f" most {len(pieces)}"
        )
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS.values()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIALS)


def _merged(words: Counter[str], letters: list[str], size: int) -> list[str]:
    """At most `size` pieces of the words: the letters, then what byte-pair merges make of them.

    The trainer of WordPiece itself numbers the letters inside words by a hash table that is random
    in every process, and breaks ties by these numbers: other runs, other pieces. So every letter,
    first or inside (`##`), becomes a character of its own before a trainer sees it.
    """
    code = {letter: chr(PRIVATE + i) for i, letter in enumerate(letters)}
    coded = (
        (code[word[0]] + "".join(code[f"##{c}"] for c in word[1:]), count)
        for word, count in sorted(words.items())
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(
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
    """Whether the teacher lower-cases and whether it drops accents, seen from what its normalizer
    does."""
    if normalizer is None:
        return False, False
    folded = [unicodedata.normalize("NFC", normalizer.normalize_str(c).strip("▁ ")) for c in "Aé"]
    return folded[0] == "a", folded[1] == "e"


def _count_words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    words: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return words
