"""Read a vocabulary from a `tokenizer.json`: the text of each piece, without its marks."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from teachonce.align.normalisers import normaliser_of
from teachonce.align.text import AlignmentError, Booleans

Style = Literal["prefix", "blank", "suffix", "none"]
ROLES = ("cls", "sep", "mask", "pad", "unk")
ROLE_NAMES = {
    "cls": ("[CLS]", "<s>", "<cls>", "<bos>", "<|startoftext|>", "<|begin_of_text|>"),
    "sep": ("[SEP]", "</s>", "<sep>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>"),
}
# Flags above `text.UNSEEN`, because `text.classes` caches them by code point.
CHINESE, PUNCTUATION, SYMBOL = 4, 8, 16
ISOLATING = {"BertPreTokenizer": PUNCTUATION, "Punctuation": PUNCTUATION, "Whitespace": SYMBOL}
MOST_IDS = 1 << 24  # above the largest id of any known vocabulary; each takes memory
# OverflowError: too many repetitions in a normaliser's regular expression. RecursionError: too deep
# nesting.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CJK = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


@cache
def byte_of_character() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: the byte that each character encodes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + number): byte for number, byte in enumerate(unprintable)}


@cache
def character_of_byte() -> dict[int, str]:
    """Return the character of GPT-2's byte-level alphabet that encodes each byte."""
    return {byte: character for character, byte in byte_of_character().items()}


@cache
def isolation(character: str) -> int:
    """Return the sum of the flags of the tokenizers that split this character from its neighbours.

    CHINESE (BERT's normaliser) and PUNCTUATION (BERT's pre-tokenizer): the character is a word.
    SYMBOL (`Whitespace`): a run of such characters is a word.
    """
    code, category = ord(character), unicodedata.category(character)
    # BERT takes all ASCII symbols for punctuation, such as $ and ^, which are not punctuation in
    # Unicode.
    ascii_symbol = 32 < code < 127 and not character.isalnum()
    punctuation = ascii_symbol or (code > 127 and category[0] == "P")
    # `Whitespace` splits by the expression \w+|[^\w\s]+; zero-width joiners belong to words.
    word = category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"
    word |= character.isspace()
    chinese = any(low <= code <= high for low, high in CJK)
    return CHINESE * chinese + PUNCTUATION * punctuation + SYMBOL * (not word)


def divides(before: int, after: int) -> bool:
    """Return whether a tokenizer splits between two neighbouring characters, given their flags
    `before` and `after` (see `isolation`). Only runs of symbols are one word."""
    return before != after or bool(before & ~SYMBOL)


@dataclass(frozen=True, slots=True)
class Marks:
    """Describes how a vocabulary marks where words begin or end.

    style: "prefix", a mark on pieces that continue a word (WordPiece, `##ing`); "blank", a mark for
        the space before a word (byte-level `Ġ`, Metaspace `▁`); "suffix", a mark on pieces that end
        a word (`</w>`); "none".
    mark: the mark itself.
    byte_level: pieces are bytes in the GPT-2 alphabet.
    isolates: the flags of characters that are words by themselves (see `isolation`).
    raw_bytes: a token such as `<0xE2>` is a byte.
    """

    style: Style
    mark: str
    byte_level: bool = False
    isolates: int = 0
    raw_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds a token's text and its place in a word.

    text: UTF-8 without marks; a byte-level piece may hold part of a character.
    begins: the piece begins a word.
    marked: the token has the vocabulary's mark.
    free: the vocabulary does not record whether the piece begins a word; `begins` is then the
        likelier case.
    """

    text: bytes
    begins: bool
    marked: bool
    free: bool = False


def read_piece(token: str, marks: Marks, literal: bool = False) -> Piece:
    """Return the piece of a token of tokenizer.json. An added token that is not in the model's
    vocabulary is `literal`: it has no marks."""
    if literal:
        return Piece(token.removeprefix(" ").encode(), token[:1] == " ", False, True)
    raw = RAW_BYTE.fullmatch(token) if marks.raw_bytes else None
    if raw:
        return Piece(bytes.fromhex(raw[1]), False, False)
    marked = False
    # `##` by itself is a piece with the text of two number signs.
    if marks.style == "prefix" and len(token) > len(marks.mark):
        marked = token.startswith(marks.mark)
        token = token.removeprefix(marks.mark)
    elif marks.style == "suffix":
        marked = token.endswith(marks.mark)
        token = token.removesuffix(marks.mark)
    alphabet = byte_of_character()
    if marks.byte_level and all(character in alphabet for character in token):
        text = bytes(alphabet[character] for character in token)
    elif marks.style == "blank":
        text = token.replace(marks.mark, " ").encode()
    else:
        text = token.encode()
    if marks.style == "blank":
        begins = text[:1] == b" "
        return Piece(text.removeprefix(b" "), begins, begins)
    if marks.style == "prefix":
        # Isolated punctuation is a word wherever it occurs, so `.` does not show that a word
        # begins.
        flags = [isolation(character) & marks.isolates for character in token]
        isolated = bool(flags) and all(flags) and not any(map(divides, flags, flags[1:]))
        alone = isolated and not marked
        return Piece(text, not marked and not alone, marked, alone)
    return Piece(text, True, marked, True)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Holds V tokens by id.

    tokens: as the file writes them; "" for an id that has no token.
    pieces: their texts without marks.
    special: bool [V].
    roles: ids of cls, sep, mask, pad and unk, if the vocabulary has them.
    marks: how the pieces mark where words begin or end.
    normaliser, pre_tokenizer: their settings in the file.
    """

    tokens: tuple[str, ...]
    pieces: tuple[Piece, ...]
    special: Booleans
    roles: dict[str, int]
    marks: Marks
    normaliser: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None

    def __len__(self) -> int:
        return len(self.tokens)

    def reads_as(self, other: Vocabulary) -> bool:
        """Return whether both vocabularies have the same tokens, normaliser and pre-tokenizer, so
        that they mark the same places of a text."""
        key, other_key = ((v.tokens, v.normaliser, v.pre_tokenizer) for v in (self, other))
        return key == other_key

    @classmethod
    def from_tokenizer_json(cls, text: str) -> Vocabulary:
        """Read the content of a `tokenizer.json`: WordPiece, BPE, Unigram or WordLevel.

        Raises AlignmentError if `text` is not such a file, or its normaliser is unknown.
        """
        try:
            return cls._read(json.loads(text))
        except AlignmentError:
            raise
        except MALFORMED as error:
            raise AlignmentError(
                f"tokenizer.json: not a tokenizer's file ({type(error).__name__}: {error}); pass"
                " the tokenizer.json that tokenizers wrote"
            ) from None

    @classmethod
    def _read(cls, settings: dict[str, Any]) -> Vocabulary:
        vocabulary = _tokens_by_id(settings["model"])
        added = {entry["id"]: entry for entry in settings.get("added_tokens") or ()}
        wrong = [number for number in (*vocabulary, *added) if not 0 <= number < MOST_IDS]
        if wrong:
            raise ValueError(f"expected ids from 0 to {MOST_IDS - 1:,}, got {wrong[0]:,}")
        tokens = [""] * (max([*vocabulary, *added], default=-1) + 1)
        special = np.zeros(len(tokens), bool)
        for number, token in vocabulary.items():
            tokens[number] = token
        for number, entry in added.items():
            tokens[number], special[number] = entry["content"], entry["special"]
        roles = _roles(settings, tokens, special)
        # The model's own unk token need not be among the added tokens, which are those with a flag.
        special[list(roles.values())] = True
        marks = _marks(settings)
        literal = added.keys() - vocabulary.keys()  # tokens of the model have marks
        pieces = (read_piece(token, marks, n in literal) for n, token in enumerate(tokens))
        normaliser = settings.get("normalizer")
        normaliser_of(normaliser)  # raises for an unknown normaliser now, not at the first map
        pre_tokenizer = settings.get("pre_tokenizer")
        return cls(tuple(tokens), tuple(pieces), special, roles, marks, normaliser, pre_tokenizer)


def _kind(model: dict[str, Any]) -> str:
    """Return the model's type. Files of the first `tokenizers` releases do not name it."""
    if "type" in model:
        return str(model["type"])
    if "merges" in model:
        return "BPE"
    if isinstance(model["vocab"], list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _tokens_by_id(model: dict[str, Any]) -> dict[int, str]:
    kind = _kind(model)
    if kind not in ("WordPiece", "BPE", "Unigram", "WordLevel"):
        raise AlignmentError(
            f"tokenizer.json, model: unknown type {kind!r}; choose another tokenizer"
        )
    if kind == "Unigram":
        return {number: token for number, (token, _) in enumerate(model["vocab"])}
    return {number: token for token, number in model["vocab"].items()}


def _steps(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the normalisers, pre-tokenizers and decoders of a tokenizer, sequences flattened."""
    waiting = [settings.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        step = waiting.pop()
        if step:
            yield step
            for name in ("normalizers", "pretokenizers", "decoders"):
                waiting.extend(step.get(name) or ())


def _marks(settings: dict[str, Any]) -> Marks:
    model = settings["model"]
    kind = _kind(model)
    steps = list(_steps(settings))
    types = {step.get("type") for step in steps}
    isolates = 0
    for step in steps:
        isolates |= ISOLATING.get(step.get("type", ""), 0)
        if step.get("type") == "BertNormalizer" and step.get("handle_chinese_chars", True):
            isolates |= CHINESE
    byte_level = "ByteLevel" in types
    prefix = model.get("continuing_subword_prefix") or ("##" if kind == "WordPiece" else "")
    suffix = model.get("end_of_word_suffix")
    # Before byte level: CLIP's tokenizer has both, and marks the ends of words alone.
    if suffix:
        return Marks("suffix", suffix, byte_level, isolates)
    if byte_level:
        return Marks("blank", "\u0120", True, isolates)
    if prefix:
        return Marks("prefix", prefix, False, isolates)
    raw_bytes = bool(model.get("byte_fallback"))
    blank = next((s["replacement"] for s in steps if s.get("type") == "Metaspace"), "\u2581")
    # The BPE of Llama 2 has no Metaspace step: normalisers (Prepend, Replace) write its spaces.
    written = {s.get("prepend") or s.get("content") for s in steps} & {"\u2581"}
    if kind == "Unigram" or "Metaspace" in types or written:
        return Marks("blank", blank, False, isolates, raw_bytes)
    return Marks("none", "", False, isolates, raw_bytes)


def _roles(settings: dict[str, Any], tokens: list[str], special: Booleans) -> dict[str, int]:
    """Find the ids of cls, sep, mask, pad and unk.

    The post-processor, the model and the padding settings name them; if not, the usual names do.
    """
    number = {token: i for i, token in enumerate(tokens) if special[i]}
    # Special tokens win: an ordinary piece can have the name of one.
    everything = {token: i for i, token in enumerate(tokens) if token} | number
    names = _named_roles(settings)
    roles = {}
    for role in ROLES:
        if names.get(role) in everything:
            roles[role] = everything[names[role]]
        else:
            ids = [number[name] for name in ROLE_NAMES[role] if name in number]
            roles |= {role: ids[0]} if ids else {}
    return roles


def _named_roles(settings: dict[str, Any]) -> dict[str, str]:
    model, names = settings["model"], {}
    if model.get("unk_token"):
        names["unk"] = model["unk_token"]
    elif model.get("unk_id") is not None:
        names["unk"] = model["vocab"][model["unk_id"]][0]
    if settings.get("padding"):
        names["pad"] = settings["padding"]["pad_token"]
    processor = settings.get("post_processor") or {}
    for step in (processor, *(processor.get("processors") or ())):
        for role in ("cls", "sep"):
            if role in step:
                names[role] = step[role][0]
        single = [item for entry in step.get("single") or () for item in entry.items()]
        kinds = [kind for kind, _ in single]
        if "Sequence" in kinds:
            text = kinds.index("Sequence")
            before, after = single[:text][:1], single[text + 1 :][:1]
            names |= {"cls": before[0][1]["id"]} if before else {}
            names |= {"sep": after[0][1]["id"]} if after else {}
    return names
