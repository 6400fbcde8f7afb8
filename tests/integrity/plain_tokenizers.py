"""Tokenizers that count as plain load whatever else is altered in them, and their work and output
stay proportional to the text."""

import contextlib
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from teachonce.store.errors import StoreError
from teachonce.store.read.stored_tokenizer import encoded, is_plain, parse_tokenizer
from tests.integrity.odd_tokenizers import CHANGES, TEXT, Change, _anywhere, _step
from tests.making.models import TOKENIZER_KINDS, trained_tokenizer

MEMORY, SECONDS = 2 << 30, 20  # for a process with few imports
HEAD = ("what was altered", "tokenizers", "out of proportion or failed")
TEXTS = [TEXT * 100, "constructor" * 300, "e\u0301\ufdfa\u202e \U0001f9ac" * 300, " " * 3000, ""]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
CONTENTS = (
    "a", "river", "\u202e", "\u0301", " ", "  ", "\u200b", "\ufffd", "\n", "A", "constructor",
    "e\u0301", "[UNK]", "<s>", "x" * 999, "\x00", "\ufdfa", "", "##a", "\u2581", "\u0120",
)  # fmt: skip
NORMALIZERS: tuple[dict[str, Any], ...] = (
    *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")),
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
     "strip_accents": True, "lowercase": True},
)  # fmt: skip
PRE_TOKENIZERS: tuple[dict[str, Any], ...] = (
    *({"type": kind} for kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")),
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
)  # fmt: skip


def _added(settings: dict[str, Any], chance: random.Random) -> None:
    known = len(settings["model"]["vocab"])
    for _ in range(chance.choice([1, 2, 2, 5])):
        flags = {flag: chance.random() < 0.5 for flag in FLAGS}
        content = chance.choice(CONTENTS) * chance.choice([1, 1, 1, 2])
        settings["added_tokens"].append({"id": known, "content": content, **flags})
        known += chance.choice([0, 1, 1, 1, 1, 100])


def _known(settings: dict[str, Any], chance: random.Random) -> None:
    if chance.random() < 0.2:
        chance.choice(list(CHANGES.values()))(settings, chance)


KINDS: dict[str, Change] = {
    "added": _added,
    "normalizer": lambda settings, chance: _step(
        settings, "normalizer", chance.choice(NORMALIZERS), "normalizers"
    ),
    "pre_tokenizer": lambda settings, chance: _step(
        settings, "pre_tokenizer", chance.choice(PRE_TOKENIZERS), "pretokenizers"
    ),
    "anywhere": _anywhere,
    "known": _known,
}


def _altered(chance: random.Random) -> tuple[str, bytes]:
    kind = chance.choice(TOKENIZER_KINDS)
    settings = json.loads(trained_tokenizer(kind).backend_tokenizer.to_str())
    done = [kind]
    for _ in range(chance.choice([1, 2, 3])):
        what = chance.choice(list(KINDS))
        done.append(what)
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            # an alteration may look for a value that an earlier one removed
            KINDS[what](settings, chance)
    return ", ".join(done), json.dumps(settings).encode()


def _use(data: bytes) -> None:
    try:
        tokenizer = parse_tokenizer(data, "it")
        for text in TEXTS:
            encoded(tokenizer, [text], "it")
            encoded(tokenizer, [f"{text}\x1f{TEXT}"], "it", "\x1f")
    except StoreError as error:
        if "tokens for a text" in str(error):
            raise


def _ended(work: Callable[[bytes], None], data: bytes) -> str:
    """Return the error in the ending of a limited process ("" if there is none)."""
    number = os.fork()
    if number == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
        signal.alarm(SECONDS * 5)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        code = 1
        try:
            work(data)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(number, 0)
    return "" if status == 0 else f"exit code {os.waitstatus_to_exitcode(status)}"


def plain_tokenizers(count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Use `count` altered plain tokenizers; yield the change, the error or "", the tokenizer."""
    chance = random.Random(seed)
    os.environ["RAYON_NUM_THREADS"] = "1"  # the threads of a library do not survive a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while count:
        what, data = _altered(chance)
        if is_plain(data):
            count -= 1
            yield what, _ended(_use, data), data


def trial(count: int, seed: int) -> tuple[list[list[object]], list[str]]:
    """Use `count` altered tokenizers; return the rows of HEAD, and the errors."""
    found, bad, wrong = Counter[str](), Counter[str](), list[str]()
    for what, problem, data in plain_tokenizers(count, seed):
        for kind in dict.fromkeys(what.split(", ")[1:]):
            found[kind] += 1
            bad[kind] += bool(problem)
        if problem:
            wrong.append(f"{what}: {problem}: {data.decode()}")
    return [[kind, found[kind], bad[kind]] for kind in sorted(found)], wrong
