"""Byte-level vocabularies of decoders: byte-pair encoding of the words into which a pattern splits
a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from teachonce.support.errors import UserError

SPECIALS = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|pad|>",
}
ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
PATTERNS = {
    "gpt-2": rf"{ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    "llama-bpe": (
        rf"(?i:{ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        rf"(?i:{ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns by their name in llama.cpp, which refuses a vocabulary with any other pattern."""
BYTES = 256


@dataclass(frozen=True)
class Family:
    """Describes the vocabularies of a family of decoders.

    pattern: a key of `PATTERNS`. specials: the special tokens by role. composed: whether a text is
        brought into Unicode's composed form (NFC) first.
    """

    pattern: str
    specials: Mapping[str, str] = field(default_factory=lambda: SPECIALS)
    composed: bool = False


END = "<|endoftext|>"
FAMILIES = {
    "gpt-2": Family("gpt-2"),
    "llama-bpe": Family("llama-bpe"),
    # transformers loads the tokenizer of every Qwen2 with a class that composes the text, and adds
    # this end token where a vocabulary lacks it.
    "qwen2": Family("qwen2", {**SPECIALS, "eos_token": END, "unk_token": END}, composed=True),
    "qwen3": Family("qwen2"),
}


def train_byte_level(
    texts: Iterable[str],
    size: int,
    family: str,
    specials: Sequence[str] = (),
) -> Tokenizer:
    """Train a vocabulary of at most `size` byte-level pieces. Its tokenizer puts a start token in
    front of each text, so that the first piece is predicted, too.

    family: a key of `FAMILIES`. specials: the special tokens, the start token first; by default
        the family's.

    The vocabulary is smaller if the text has too few pieces. Raises UserError if `size` is too
    small for every byte and the special tokens.
    """
    settings = FAMILIES[family]
    specials = specials or tuple(dict.fromkeys(settings.specials.values()))
    needed = BYTES + len(specials)
    if size < needed:
        raise UserError(
            f"--vocab {size}: a decoder's vocabulary has at least the {BYTES} bytes and"
            f" {len(specials)} special tokens; give {needed} pieces or more"
        )
    tokenizer = Tokenizer(models.BPE())
    if settings.composed:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERNS[settings.pattern]), "isolated")
    # Without ByteLevel's own regex, which would split again by GPT-2's pattern.
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(specials),
        # All 256 bytes, also those that these texts lack: no later text has an unknown piece.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = specials[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer
