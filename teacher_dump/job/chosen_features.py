"""Chooses the features of a store: those that the options ask for and the teacher has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from store import Features
from store.format.pairs import SEPARATOR
from support.console import counted
from support.errors import UserError
from teacher_dump.corpus.labelled_text import pair_of
from teacher_dump.job.options import (
    DEFAULT_LOGITS,
    DEFAULT_MAX_LENGTH,
    DumpOptions,
    check_head,
    check_length,
    parse_logits,
)

if TYPE_CHECKING:
    from teacher_dump.teacher.teacher import Teacher


def told(options: DumpOptions, features: Features) -> str:
    """Tell what the store is going to hold.

    Which logits it holds is only known once the teacher is loaded.
    """
    logits = options.logits or DEFAULT_LOGITS
    if task := features.task:
        logits = f"of {counted(len(task.labels), 'label')} ({task.kind})"
        logits = "a score of each pair" if task.scores and task.separator else logits
    elif logits != "none" and not features.logits:
        reason = "--head none" if options.head == "none" else "no masked-LM head in the checkpoint"
        logits = f"none ({reason})"
    if vector := features.embedding:
        length = ", length 1" if vector.normalised else ""
        prompt = f", prompt {vector.prompt!r}" if vector.prompt else ""
        kept = f"embedding {vector.width} wide ({vector.pooling}{length}{prompt})"
    else:
        kept = f"logits {logits}"
    return (
        f"features  {kept}, hidden {options.hidden}, attention {options.attention}, "
        f"{counted(features.views, 'view')}, windows of at most {features.max_length} tokens"
    )


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
