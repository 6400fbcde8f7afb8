"""Chooses the features of a store: those that the options ask for and the teacher has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from teachonce.store import Features
from teachonce.store.format.pairs import SEPARATOR
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.labelled_text import pair_of
from teachonce.teacher_dump.job.options import (
    DEFAULT_LOGITS,
    DEFAULT_MAX_LENGTH,
    DumpOptions,
    check_head,
    check_length,
    parse_logits,
)

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher


def window_length(asked: int | None, teacher: Teacher) -> int:
    """Return the tokens of the longest window; UserError where the teacher reads fewer."""
    limit = teacher.max_length()
    check_length(asked, limit)
    own = teacher.text_vectors.max_length if teacher.text_vectors else None
    known = [int(n) for n in (DEFAULT_MAX_LENGTH, limit, own) if n]
    return min(known) if asked is None else asked


def features_of(options: DumpOptions, teacher: Teacher, max_length: int) -> Features:
    """Return the features that the options ask for and the teacher has.

    Raises UserError where the options do not fit the teacher.
    """
    if options.views > 1 and teacher.tokenizer.mask_token_id is None:
        raise UserError(
            f"--views {options.views}: the teacher's tokenizer has no mask token; use --views 1"
        )
    check_head(options, teacher.head or "none")
    logits = None
    if teacher.decoder and not teacher.task:
        logits = parse_logits(
            options.logits or DEFAULT_LOGITS,
            teacher.decoder.weight.shape[1],
            teacher.vocabulary,
            teacher.head == "causal",
        )
    elif not teacher.task and options.logits not in (None, "none"):
        raise UserError(
            f"--logits {options.logits}: no LM head was read from {teacher.name}; leave --logits"
            " out for hidden states and attention maps only, or train a head first with `downstream"
            " --task mlm`"
        )
    vector = teacher.text_vectors.spec if teacher.text_vectors else None
    if vector and options.student_column:
        vector = replace(vector, parallel=True)
    kept = logits or teacher.task or vector or teacher.hidden.groups or teacher.attention.groups
    if not (kept or options.text_only):
        raise UserError(
            "the checkpoint has no LM head and neither --hidden nor --attention was asked for:"
            " nothing to dump"
        )
    task = teacher.task
    if task and pair_of(options.text_column):
        task = replace(task, separator=SEPARATOR)
    return Features(
        views=options.views,
        max_length=max_length,
        width=teacher.width,
        vocabulary=teacher.vocabulary,
        codec=options.codec,
        hidden=tuple(teacher.hidden.groups),
        attention=tuple(teacher.attention.groups),
        logits=logits,
        task=task,
        embedding=vector,
    )
