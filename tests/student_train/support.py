"""Small trainings: their options, the student at its start, its first batch and its validation."""

from typing import Any

import torch

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import evaluate


def options_for(store: FeatureStore, **changes: Any) -> TrainOptions:
    """Make options of a small student in fp32 on the CPU, with these changes."""
    small: dict[str, Any] = {"vocab": "400", "student": "16x2x2", "device": "cpu"}
    small |= {"precision": "fp32"} | ({} if "batch_texts" in changes else {"batch_tokens": 512})
    return TrainOptions(store.path, **small | changes).resolved()


def prepared(store: FeatureStore, **changes: Any) -> tuple[Any, Any, TrainOptions]:
    """Return a student of these options with its initial weights, its collator, and the options."""
    options = options_for(store, **changes)
    student, collator, _ = prepare(options, store)
    return student, collator, options


def distilling(store: FeatureStore, **changes: Any) -> tuple[Distiller, Any, TrainOptions]:
    """Return the distiller of such a student in evaluation mode, its collator, and the options."""
    student, collator, options = prepared(store, **changes)
    return Distiller.of(student, options, store).eval(), collator, options


def first_batch(store: FeatureStore, collator: Collator, tokens: int = 512) -> StudentBatch:
    """Return the first batch of the plain view."""
    raw = next(iter(store.stream(0, 0, tokens, features=collator.features())))
    return collator(raw, 0, (0,)).to(torch.device("cpu"))


def validated(
    distiller: Distiller, store: FeatureStore, collator: Collator, options: TrainOptions
) -> dict[str, float]:
    """Return the figures of a validation over the held-out texts."""
    _, held_out = split_blocks(store, options.held_out)
    return evaluate(distiller, store, collator, held_out, options.batch_plan(distiller.terms))
