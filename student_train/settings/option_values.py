"""Checks option values that are given as text, before a store is opened or torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from teachonce.checkpoints.checkpoint_tokenizer import save_from_hub
from teachonce.store.containers.cache_option import EXPECTED, is_disk_cache, parse_disk_cache
from teachonce.student_train.settings.shapes import DEFAULT_KIND, SHAPES, parse_student
from teachonce.support.errors import UserError, suggest, suggest_path
from teachonce.support.parsing import DIGITS

AS_TEACHER = "teacher:"  # before a number of layers: a student of the teacher's width and heads
CACHES = ("none", "ram", "device")
# Factor of the default learning rate of a decoder that begins with layers of another model. Bits
# per byte after .5M tokens: 2.117 for `llama:256x4x4x768` at twice the rate of other students,
# 2.158 at that rate and 2.121 at four times (RESULTS, "Decoder students").
CUT_RATE = 2
VOCABULARIES = ("5k", "10k", "20k", "30k", "teacher", "pruned:", "words", "words:", "mixed-vocab")
"""Words and prefixes of `--vocab`, for shell completion; a number or a folder is valid as well."""
STUDENTS = ("tiny", "teacher:", *(f"{kind}:" for kind in SHAPES if kind != DEFAULT_KIND))
FOLDER = "folder:"  # before the path of a model of which a student starts with all weights
STARTS = ("auto", "vocab", "svd", "svd:", "teacher", "layers:", FOLDER, "mixed-vocab", "random")
OF_TEXT = rf"(words:|pruned:)?(?!0){DIGITS}[kK]?|words"
VOCABULARY = rf"{OF_TEXT}|teacher|mixed-vocab"
PARTS = ("embeddings", "words", "positions", "types", "layers", "head", "projection")
EXPECTED_PARTS = "embeddings, words, positions, types, layers, layers.N, head or projection"
START = r"auto|random|teacher|vocab|mixed-vocab|svd(:.+)?|layers:.+|folder:.+"


def check_vocabulary_word(word: str, option: str = "--vocab") -> None:
    """Check the value of `--vocab`. Raises UserError unless it is a vocabulary or may be a path."""
    # A path that does not exist yet passes: an earlier training of a sweep may create the folder.
    if os.sep not in word or Path(word).is_file():
        check_vocabulary(word, option)


def is_made_of_text(word: str) -> bool:
    """Return whether a vocabulary is built from the text of a store."""
    return re.fullmatch(OF_TEXT, word) is not None


def check_vocabulary(word: str, option: str = "--vocab") -> None:
    """Raise UserError unless `word` names a vocabulary or an existing folder."""
    if not re.fullmatch(VOCABULARY, word) and not Path(word).is_dir():
        near = suggest_path(word) or suggest(word, ["teacher", "words", "mixed-vocab"])
        near = "is a file; " if Path(word).is_file() else near
        raise UserError(
            f"{option} {word}: {near}expected a size (5k, 8000), a folder with a tokenizer,"
            " teacher, pruned:SIZE, words, words:SIZE or mixed-vocab"
            f"{'' if near else save_from_hub(word)}"
        )


def check_start(how: str) -> None:
    """Raise UserError unless `how` is a value of `--init`."""
    # DOTALL, because a path may have a line break.
    if not re.fullmatch(START, how, re.DOTALL):
        raise UserError(
            f"--init {how}: expected auto, vocab, svd, svd:STORE, teacher, layers:I,J,...[@DIR],"
            " folder:DIR, mixed-vocab, or random"
        )


def check_cache_word(word: str) -> None:
    """Raise UserError unless `word` is a value of `--cache`."""
    if is_disk_cache(word):
        parse_disk_cache(word)
    elif word not in CACHES:
        raise UserError(f"--cache {word}: expected {', '.join(CACHES)} or {EXPECTED}")


def stays_in_memory(word: str) -> bool:
    """Return whether a value of `--cache` stores decoded features in memory."""
    return word in CACHES[1:]


def check_student(student: str) -> None:
    """Raise UserError unless `student` is a shape, or means the shape of a model."""
    if not is_shape_of_model(student):
        parse_student(student)


def is_shape_of_model(student: str) -> bool:
    """Return whether a value of `--student` means the shape of a model: `teacher:L`, or a
    folder."""
    return student.startswith(AS_TEACHER) or is_model_folder(student)


def is_model_folder(student: str) -> bool:
    """Return whether a value of `--student` is the folder of a model, not a shape."""
    if student.startswith(AS_TEACHER) or not (Path(student) / "config.json").is_file():
        return False
    # A word that is a shape means the shape, even if a folder has the same name.
    try:
        parse_student(student)
    except UserError:
        return True
    return False


def is_part(word: str) -> bool:
    """Return whether a word names a part of a student."""
    return word in PARTS or re.fullmatch(r"layers\.[1-9][0-9]*", word) is not None


def parse_parts(words: str) -> tuple[str, ...]:
    """Split a comma-separated list into its words."""
    return tuple(word.strip() for word in words.split(",") if word.strip())


def check_student_parts(parts: Sequence[str]) -> None:
    """Raise UserError unless every word names a part of a student."""
    for part in parts:
        if not is_part(part):
            raise UserError(f"--freeze {part}: expected {EXPECTED_PARTS}")


def parse_widths(words: str) -> tuple[int, ...]:
    """Read a comma-separated list of numbers. Raises UserError for anything else."""
    widths = parse_parts(words)
    if not all(width.isdecimal() for width in widths):
        raise UserError(
            f"--matryoshka {words}: expected sizes of vectors, separated by commas, such as"
            " 256,128,64"
        )
    return tuple(map(int, widths))


def check_widths(widths: Sequence[object]) -> None:
    """Raise UserError unless the widths are different whole numbers above 0."""
    numbers = all(isinstance(width, int) and width > 0 for width in widths)
    if not numbers or len(set(widths)) < len(widths):
        raise UserError(
            f"--matryoshka {','.join(map(str, widths))}: expected different sizes of vectors, each"
            " at least 1, such as 256,128,64"
        )
