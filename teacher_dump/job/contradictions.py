"""Refuses options of a dump that contradict each other, or do not apply to a head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from teachonce.store.errors import NO_QUEUE
from teachonce.store.format.features import TASKS
from teachonce.support.errors import UserError
from teachonce.support.options import default_of, flag_of
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN, pair_of
from teachonce.teacher_dump.job.option_values import AUTO, TEXT_HEADS, shard_of

if TYPE_CHECKING:
    from teachonce.teacher_dump.job.options import DumpOptions


def check_together(options: DumpOptions) -> None:
    """Raise UserError for options that contradict each other, whatever the teacher is."""
    _refuse(_contradictions(options))


def check_head(options: DumpOptions, head: str) -> None:
    """Raise UserError for options that do not apply to a head."""
    _refuse(_unfit_for(options, head))


def _refuse(problems: Iterator[str]) -> None:
    # The first one alone: an error is one line (CONTRIBUTING.md, Habits).
    for problem in problems:
        raise UserError(problem)


def _contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each contradiction between options; none depends on the teacher."""
    if "://" in str(options.out) and (options.ray is not None or shard_of(options.shard)):
        yield f"{options.out}: {NO_QUEUE}"
    if options.ray is not None and options.shard is not None:
        yield (
            f"--shard {options.shard} and --ray contradict each other: Ray starts the processes"
            " itself; leave one out"
        )
    if options.grow_from is None and options.gone is not None:
        yield f"--gone {options.gone}: needs the store of --grow-from; add it, or leave --gone out"
    # Compared as text, because either may be the address of a bucket.
    if options.grow_from and str(options.grow_from).rstrip("/") == str(options.out).rstrip("/"):
        yield (
            f"--grow-from {options.grow_from}: is also --out, and a finished store is not"
            " changed; give the grown store another name (the old one can be removed then)"
        )
    if options.ray is None and options.ray_gpus is not None:
        yield f"--ray-gpus {options.ray_gpus:g}: applies to workers of Ray; add --ray"
    for name in ("grow_from", "shard", "ray"):
        if options.plan and getattr(options, name) is not None:
            yield (
                f"--plan and {flag_of(name)}: a plan covers a whole dump by one process; leave one"
                " of them out"
            )
    for name in ("mask_prob", "mask_words"):
        value = getattr(options, name)
        if options.views == 1 and value != default_of(type(options), name):
            yield (
                f"{flag_of(name)} {value}: no word is masked in view 0, the only view; leave it"
                " out, or request masked views of a masked LM (--views 2)"
            )
    yield from _head_contradictions(options)
    yield from _chat_contradictions(options)
    if options.student_column is not None:
        yield from _parallel_contradictions(options, options.student_column)


def _head_contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each option that contradicts --head."""
    head = "--head" if options.head == "none" else "--logits"
    logits = options.head if options.head == "none" else options.logits
    nothing = logits == options.hidden == options.attention == "none"
    if nothing and options.head not in (*TASKS, *TEXT_HEADS) and not options.text_only:
        yield (
            f"{head}, --hidden and --attention are all none: the store would hold no output of the"
            " teacher; request one of them"
        )
    unread = options.head in ("mlm", "causal") and options.logits == "none"
    if unread or (options.head == "none" and options.logits not in (None, "none")):
        yield (
            f"--head {options.head} and --logits {options.logits} contradict each other: leave one"
            " out"
        )
    if options.head == "score":
        if not pair_of(options.text_column):
            yield (
                "--head score: a score needs two texts; name their columns, --text-column A,B (such"
                " as query,passage)"
            )
        if options.label_column is not None:
            yield (
                f"--label-column {options.label_column}: a score has no classes to label; leave it"
                " out"
            )
        # A reranker is loaded as a classifier with one output (`load_with_head`).
        yield from _unfit_for(options, "classification")
    # The head of `auto` is not known yet: `check_inputs` and `features_of` check it.
    elif options.head != AUTO:
        yield from _unfit_for(options, options.head)
    alone = options.head == "embedding" and options.hidden == options.attention == "none"
    if alone and options.views > 1 and options.student_column is None:
        yield (
            f"--views {options.views}: the vector of a text is computed from the plain text (view"
            " 0), and nothing else is stored; add --hidden or --attention, or leave --views out"
        )
    for name in ("pooling", "prompt", "student_column"):
        if options.head != "embedding" and getattr(options, name) is not None:
            yield (
                f"{flag_of(name)} {getattr(options, name)}: applies to vectors of texts; add --head"
                f" embedding, or leave {flag_of(name)} out"
            )


def _chat_contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each option that contradicts --messages."""
    if options.messages is None:
        if options.learn is not None:
            yield f"--learn {options.learn}: applies to chats; add --messages, or leave --learn out"
        return
    for name in ("text_column", "label_column", "student_column"):
        if (column := getattr(options, name)) is not None:
            yield (
                f"--messages {options.messages} and {flag_of(name)} {column} contradict each other:"
                " the text of a chat is its messages; leave one out"
            )


def _parallel_contradictions(options: DumpOptions, column: str) -> Iterator[str]:
    """Yield a message for each option that needs teacher and student to read the same text."""
    start = f"--student-column {column}: teacher and student read different texts"
    if column in (options.text_column or DEFAULT_COLUMN).split(","):
        yield f"--student-column {column}: is also the teacher's column; name another, or none"
    if not options.hidden == options.attention == "none":
        yield (
            f"{start}, so their tokens cannot be aligned; store vectors only: --head embedding,"
            " without --hidden and --attention"
        )
    if options.views > 1:
        yield f"{start}, so the same words cannot be masked in both; use --views 1"
    if options.grow_from is not None:
        yield (
            f"{start}, and the store holds no teacher's text to compare with the corpus; leave"
            " --grow-from out"
        )


def _unfit_for(options: DumpOptions, head: str) -> Iterator[str]:
    """Yield a message for each option that does not apply to a head."""
    article = "an" if head == "embedding" else "a"
    reason = f"the teacher's head is: {head}"
    if head == "none" and options.logits == "none":
        reason = "no head is loaded with --logits none"
    if head in TASKS and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: applies to the logits of a vocabulary; all logits of a"
            f" {head} head are stored: leave --logits out"
        )
    if head not in ("classification", "tagging") and options.label_column is not None:
        yield (
            f"--label-column {options.label_column}: labels are stored with the logits of a"
            f" classification or tagging head, and the teacher's head is: {head}; leave"
            " --label-column out, or fine-tune the teacher on the labels first"
        )
    if head != "classification" and pair_of(options.text_column):
        yield (
            f"--text-column {options.text_column}: pairs of texts need a classification head, and"
            f" the teacher's head is: {head}; give one column, or fine-tune the teacher on pairs"
            " first"
        )
    if head == "embedding" and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: --head embedding reads no LM head; leave --logits out, or"
            " dump the logits into another store"
        )
    if head in ("classification", "embedding") and options.stride:
        yield (
            f"--stride {options.stride}: for {article} {head} head a document is one sequence, cut"
            " at --max-length; leave --stride out"
        )
    if head != "causal" and options.messages is not None:
        yield (
            f"--messages {options.messages}: applies to a causal head, and {reason}; give a decoder"
            " and its logits, or leave --messages out"
        )
    # `auto` and `none` change nothing for other heads (`Teacher.start_with`).
    if head != "causal" and options.bos not in (AUTO, "none"):
        yield f"--bos {options.bos}: applies to a causal head, and {reason}; leave --bos out"
    if head == "causal" and options.views > 1:
        # A causal teacher never saw [MASK]; its logits for masked words would mean nothing.
        yield f"--views {options.views}: a causal head reads no masked words; use --views 1"
