"""Chooses the features of a store: what the options of a dump request and the teacher has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from teachonce.store import Features, LogitsSpec
from teachonce.store.format.features import OutputKind
from teachonce.store.format.sequences import SEPARATOR
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.labelled_text import pair_of
from teachonce.teacher_dump.job.contradictions import check_head
from teachonce.teacher_dump.job.option_values import (
    DEFAULT_LOGITS,
    DEFAULT_MAX_LENGTH,
    tier_and_size,
)
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.windows.chats import check_chat_template

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

LATER = ("observed", "ranked")
"""Keys of `logits` that earlier releases did not store."""


def features_of(options: DumpOptions, teacher: Teacher) -> Features:
    """Choose the features of a store: what the options request and the teacher has.

    Raises UserError if the options do not fit the teacher.
    """
    max_length = window_length(options.max_length, teacher)
    if options.views > 1 and teacher.tokenizer.mask_token_id is None:
        raise UserError(
            f"--views {options.views}: the teacher's tokenizer has no mask token; use --views 1"
        )
    # Again: if config.json declares no head, only the loaded weights show whether there is one.
    check_head(options, teacher.head or "none")
    if options.messages is not None:
        check_chat_template(teacher.tokenizer, teacher.name)
    logits, task = None, teacher.task
    if teacher.decoder and not task:
        width = teacher.decoder.weight.shape[1]
        spec = options.logits or DEFAULT_LOGITS
        causal, cap = teacher.head == "causal", teacher.decoder.cap
        logits = logits_of(spec, width, teacher.vocabulary, causal, cap)
    elif not task and options.logits not in (None, "none"):
        raise UserError(
            f"--logits {options.logits}: {teacher.name} has no LM head; give --logits none to"
            " store only hidden states and attention maps, or train a head first with `downstream"
            " --task mlm`"
        )
    vector = teacher.text_vectors.spec if teacher.text_vectors else None
    if vector and vector.prompt:
        _check_prompt(vector.prompt, teacher.tokenizer, max_length)
    if vector and options.student_column:
        vector = replace(vector, parallel=True)
    stored = logits or task or vector or teacher.hidden.groups or teacher.attention.groups
    if not (stored or options.text_only):
        raise UserError(
            "the checkpoint has no LM head, and neither --hidden nor --attention was requested:"
            " nothing to dump; request --hidden mean, or train a head first with"
            " `downstream --task mlm`"
        )
    if task:
        check_gold(options, task.output_kind)
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
        context=teacher.head == "causal" and options.stride > 0,
        learn=options.messages is not None,
        messages=options.messages is not None,
    )


def window_length(requested: int | None, teacher: Teacher) -> int:
    """Return the longest window in tokens. Raises UserError if the teacher's limit is lower."""
    limit = teacher.max_length()
    if requested is not None and teacher.sparse_from in range(1, requested):
        raise UserError(
            f"--max-length {requested}: the attention of {teacher.name} is sparse for texts of more"
            f" than {teacher.sparse_from} tokens (attention_type block_sparse), and its output then"
            " depends on the other texts of a batch; give at most --max-length"
            f" {teacher.sparse_from}, or set attention_type to original_full in its config.json"
        )
    check_length(requested, limit)
    vector_limit = teacher.text_vectors.max_length if teacher.text_vectors else None
    limits = [int(n) for n in (DEFAULT_MAX_LENGTH, limit, vector_limit) if n]
    return min(limits) if requested is None else requested


def check_length(requested: int | None, limit: int | None) -> None:
    """Raise UserError if windows are longer than the teacher's input may be."""
    if requested is not None and limit is not None and requested > limit:
        raise UserError(
            f"--max-length {requested}: the teacher reads at most {limit} tokens; give a smaller"
            " length, or leave --max-length out"
        )


def _check_prompt(prompt: str, tokenizer: Any, max_length: int) -> None:
    """Raise UserError if the prompt leaves no room for a text."""
    tokens = len(tokenizer(prompt)["input_ids"])
    if tokens >= max_length:
        raise UserError(
            f"--max-length {max_length}: the prompt {prompt!r:.60} alone is {tokens} tokens,"
            " special tokens included, and leaves no room for a text; give a larger --max-length,"
            " --prompt with the name of a shorter one, or --prompt '' for none"
        )


def logits_of(
    spec: str, width: int, vocabulary: int, next_token: bool = False, cap: float | None = None
) -> LogitsSpec | None:
    """Parse `--logits`; None for `none`. `width` is the size of the head's input. Raises UserError
    if K is not below the size of the vocabulary."""
    tier, size = tier_and_size(spec)
    if tier == "none":
        return None
    if tier == "topk" and size >= vocabulary:
        raise UserError(
            f"--logits {spec}: the teacher's vocabulary has {vocabulary} tokens; give a smaller K"
        )
    if tier == "head":
        return LogitsSpec(tier, width, next_token, cap=cap)
    # `observed` is needed, as 22 % of next tokens are not among the best ids. It takes 2 bytes a
    # token, uncompressed. With `ranked`, 64 logits of a vocabulary of 152,000 take 192 bytes a
    # token instead of 247.
    return LogitsSpec(tier, size, next_token, observed=next_token, ranked=tier == "topk")


def check_gold(options: DumpOptions, output_kind: OutputKind) -> None:
    """Raise UserError for --label-column if the teacher's task does not have one label per text. A
    store holds one gold label per text."""
    if options.label_column is None or output_kind == "one label":
        return
    output = "numbers, not labels" if output_kind == "numbers" else "several labels at once"
    raise UserError(
        f"--label-column {options.label_column}: the teacher {options.model} gives a text {output},"
        " and a store holds one gold label per text; leave --label-column out"
    )


def as_started(features: Features, started: Mapping[str, Any] | None) -> Features:
    """Drop features that are missing in a store started by an earlier release.

    started: the root attributes of that store; None for a new store.
    """
    if started is None:
        return features
    before, logits = Features.from_json(started["features"]), features.logits
    if logits and before.logits:
        # All parts of a store have one form: new parts have these arrays only if the first has.
        shared = {key: getattr(logits, key) and getattr(before.logits, key) for key in LATER}
        logits = replace(logits, **shared)
    return replace(features, logits=logits, context=features.context and before.context)
