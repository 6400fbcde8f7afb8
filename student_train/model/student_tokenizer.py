"""Makes the student's tokenizer: a WordPiece trained on the store's text, the tokenizer of a
folder, the teacher's (all or pruned), or the tokenizer of a mixed-vocabulary training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from teachonce.checkpoints.checkpoint_tokenizer import why_unloadable
from teachonce.store import FeatureStore
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.format.sequences import has_pair_form
from teachonce.student_train.data.own_template import template_of_student
from teachonce.student_train.data.vocabularies import read_vocabulary
from teachonce.student_train.model.chats import between, chat_marks
from teachonce.student_train.model.pruning import pruned_tokenizer
from teachonce.student_train.settings.option_values import check_vocabulary
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line
from teachonce.training import byte_level, wordpiece
from teachonce.training.wordpiece import SPECIALS, vocabulary_size

QWEN2 = "qwen2"
PROBES = ["HELLO e\u0301 12345", " don't\n\n  x"]
"""Texts that other rules split into other tokens: composed letters, digits, white space."""


def student_tokenizer(
    word: str,
    store: FeatureStore,
    blocks: Array | None = None,
    others: Sequence[FeatureStore] = (),
    family: str = "",
) -> PreTrainedTokenizerFast:
    """Make the tokenizer of `--vocab`.

    blocks: rows of `store.blocks()`; only their text is read.
    others: further stores, whose whole text is read as well. A corpus that several stores have is
        read once.
    family: for a decoder, the family of its byte-level vocabulary (`training/byte_level.py`).

    The tokenizer has fewer pieces than requested if the text has no more. Raises UserError for an
    invalid value, a size that is too small for the characters of the text, and a folder without a
    fast tokenizer.
    """
    size = vocabulary_size(word)
    if size is not None and family:
        return _train_byte_level(store, blocks, others, size, family)
    if size is not None:
        return train_student_wordpiece(
            _texts(store, blocks, others), size, store.tokenizer().normalizer
        )
    if word == "teacher":
        return _from_teacher(store.tokenizer(), store, word, family)
    kind, colon, number = word.partition(":")
    size = vocabulary_size(number)
    if family and kind in ("words", "mixed-vocab"):
        raise UserError(
            f"--vocab {word}: a decoder needs a vocabulary that encodes every byte; give a size"
            " such as 8k, teacher, or a folder"
        )
    if kind == "words" and bool(colon) == (size is not None):
        return _with_special_tokens(wordpiece.word_vocabulary(_texts(store, blocks, others), size))
    if kind == "pruned" and size:
        return _from_teacher(pruned_tokenizer(store, size, blocks), store, word, family)
    if word == "mixed-vocab":
        stored = MixedVocab.of(store)
        return _from_files(stored.backend(), stored.read_settings(), word)
    check_vocabulary(word)
    files.check_model_folder(Path(word))
    try:
        # By default transformers would ask on the terminal whether to run the code in a folder.
        tokenizer: Any = AutoTokenizer.from_pretrained(word, trust_remote_code=False)
    except Exception as error:  # the files are read by several libraries, with errors of any type
        raise UserError(
            f"--vocab {word}: no tokenizer can be loaded ({why_unloadable(word, error)})"
            "; give a folder that save_pretrained of a tokenizer wrote, or a size such as 5k"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"--vocab {word}: its tokenizer has only special tokens, because tokenizer.json or the"
            " vocabulary is missing or empty; save the tokenizer there, or give a size such as 5k"
        )
    checked = check_student_tokenizer(tokenizer, word, family)
    # A truncation in tokenizer.json is not the student's, and a StaticEmbedding would apply it.
    checked.backend_tokenizer.no_truncation()
    return checked


def check_student_tokenizer(tokenizer: Any, word: str, family: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer if a student can use it. `word` is the value of `--vocab`, for messages.

    family: for a decoder, a key of `FAMILIES`. A decoder needs no mask token but must encode every
        byte, and a tokenizer without a padding token gets its end-of-text token as padding. Raises
        UserError for a tokenizer that a student cannot use.
    """
    if not family:
        wordpiece.check_masking_tokenizer(tokenizer, word)
    elif not tokenizer.is_fast or not _spells_bytes(tokenizer, word):
        raise UserError(
            f"--vocab {word}: a decoder needs a fast tokenizer that encodes every byte (byte-level,"
            " or with byte fallback); give a size such as 8k"
        )
    elif tokenizer.pad_token_id is None:
        # Any token serves: padding is neither read nor predicted.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if family == QWEN2:
        _check_reloaded(tokenizer, word)
    loaded: PreTrainedTokenizerFast = tokenizer
    return loaded


def _check_reloaded(tokenizer: Any, word: str) -> None:
    """Raise UserError if the tokenizer of a Qwen2 gives other tokens once it is saved and loaded,
    because transformers loads it with its class for Qwen2."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps({"model_type": QWEN2}))
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    expected, ids = (t(PROBES)["input_ids"] for t in (tokenizer, loaded))
    if len(loaded) != len(tokenizer) or ids != expected:
        raise UserError(
            f"--vocab {word}: transformers splits the text of a Qwen2 by Qwen2's own rules, and"
            " this vocabulary has others; give a size such as 8k, or --student qwen3: or llama: in"
            " place of qwen2:"
        )


def _spells_bytes(tokenizer: PreTrainedTokenizerFast, word: str) -> bool:
    content = tokenizer.backend_tokenizer.to_str()
    marks = read_vocabulary(content, f"--vocab {word}").marks
    return marks.byte_level or marks.raw_bytes


def _texts(
    store: FeatureStore, blocks: Array | None, others: Sequence[FeatureStore]
) -> Iterator[str]:
    yield from store.single_texts(blocks)
    corpora = [store.identity.get("corpus")]
    for other in others:
        corpus = other.identity.get("corpus")
        if corpus not in corpora:
            corpora.append(corpus)
            yield from other.single_texts()


def check_pair_form(tokenizer: PreTrainedTokenizerFast, word: str, store: FeatureStore) -> None:
    """Raise UserError if a tokenizer puts no separator token between the two texts of a pair.

    word: the value of `--vocab`, for the message.
    """
    if not has_pair_form(tokenizer.backend_tokenizer):
        raise UserError(
            f"--vocab {word}: its tokenizer puts no token between the two texts of a pair, and"
            f" {store.path} holds pairs; give a size such as 5k"
        )


def default_max_length(longest: int) -> int:
    """Return the default of `--max-length`, in student tokens.

    longest: the number of teacher tokens of the longest sequence.
    """
    # A smaller vocabulary gives shorter pieces: the same text has more of them.
    return min(512, 2 * longest)


def _from_teacher(
    backend: Tokenizer, store: FeatureStore, word: str, family: str
) -> PreTrainedTokenizerFast:
    settings = store.teacher_settings("tokenizer_config.json")
    tokenizer = _from_files(backend, settings, word, family)
    if family:
        # Also for a store of plain texts: the copied layers may have been trained on chats.
        tokenizer.chat_template = template_of_student(store, tokenizer) or None
    return tokenizer


def _from_files(
    backend: Tokenizer, settings: dict[str, Any], word: str, family: str = ""
) -> PreTrainedTokenizerFast:
    names = [name for name in (*SPECIALS, "bos_token", "eos_token") if name in settings]
    try:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            model_max_length=int(settings["model_max_length"]),
            **{name: settings[name] for name in names},
        )
    except Exception as error:  # transformers raises errors of any type for invalid settings
        raise UserError(
            f"--vocab {word}: tokenizer_config.json in the store is invalid"
            f" ({type(error).__name__}: {first_line(error)}); give a size such as 5k"
        ) from error
    return check_student_tokenizer(tokenizer, word, family)


def _train_byte_level(
    store: FeatureStore,
    blocks: Array | None,
    others: Sequence[FeatureStore],
    size: int,
    family: str,
) -> PreTrainedTokenizerFast:
    """Train a decoder's vocabulary, with the special tokens of the teacher that chats contain."""
    texts = partial(_texts, store, blocks, others)
    roles = byte_level.FAMILIES[family].specials
    marks = chat_marks((store, *others), texts())
    specials = [*dict.fromkeys([*roles.values(), *marks])]
    trained = byte_level.train_byte_level(between(marks, texts()), size, family, specials)
    further = [mark for mark in marks if mark not in roles.values()]
    return PreTrainedTokenizerFast(tokenizer_object=trained, extra_special_tokens=further, **roles)


def train_student_wordpiece(
    texts: Iterable[str], size: int, teacher_normalizer: Any
) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary of `size` pieces; returns it as a transformers tokenizer."""
    return _with_special_tokens(wordpiece.train_wordpiece(texts, size, teacher_normalizer))


def _with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIALS)
