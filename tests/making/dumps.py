"""Small corpora, and dumps of them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.making.texts import ENGLISH, FRENCH, GERMAN, RUSSIAN, SLOVAK

LATIN_AND_CYRILLIC = ENGLISH + RUSSIAN + SLOVAK + GERMAN + FRENCH


def write_corpus(
    path: Path, documents: int = 60, sentences: Sequence[str] = LATIN_AND_CYRILLIC
) -> Path:
    """Write documents of one to three of the sentences, one document a line."""
    chance = random.Random(documents)
    lines = (" ".join(chance.sample(sentences, chance.randint(1, 3))) for _ in range(documents))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def dump_options(model: Path, corpus: Path, out: Path | str, **changes: Any) -> DumpOptions:
    small: dict[str, Any] = {
        "logits": "topk:8",
        "part_tokens": 2000,
        "batch_tokens": 512,
        "device": "cpu",
        "precision": "fp32",
    }
    return DumpOptions(model=str(model), corpus=(str(corpus),), out=out, **{**small, **changes})


def dumped(model: Path, corpus: Path, out: Path, **changes: Any) -> Path:
    """Dump a sealed store of several parts."""
    dump(dump_options(model, corpus, out, **changes))
    return out
