"""Sizes and batches that the tests of mixed-vocabulary training share."""

from typing import Any

from teachonce.teacher_dump.mixed_vocab.segmentation import MixedBatch, Mixer, Side
from tests.making.texts import SENTENCES

WIDTH, PIECES, LONGEST = 16, 450, 64


def mixer_of(teacher: Any, small: Any, **changes: Any) -> Mixer:
    settings: dict[str, Any] = {
        "texts": lambda: SENTENCES,
        "sides": (Side.of(teacher.tokenizer), Side.of(small)),
        "share": 0.5,
        "probability": 0.15,
        "longest": LONGEST,
        "batch_tokens": 1024,
        "seed": 3,
    }
    return Mixer(**(settings | changes))


def some(mixer: Mixer, count: int, first: int = 0) -> list[MixedBatch]:
    batches = mixer.batches(first)
    return [next(batches) for _ in range(count)]
