"""Tells, before a dump begins, by which settings it goes and what the store is going to hold."""

from __future__ import annotations

from teachonce.checkpoints.names import corpus_of
from teachonce.store import Features
from teachonce.support.console import counted
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN
from teachonce.teacher_dump.job.options import DEFAULT_LOGITS, DumpOptions


def describe(options: DumpOptions, corpus_was_given: bool) -> str:
    """Tell the settings that are known before the teacher is loaded, one line each."""
    source = "" if corpus_was_given else " (no --corpus given: the default)"
    if not corpus_was_given and options.limit is None and corpus_of(options.model):
        source = " (no --corpus given: all of the alias's own; --limit 2m takes 2 million tokens)"
    rows = {
        "teacher": options.model,
        "corpus": ", ".join(options.corpus) + source,
        "codec": options.codec,
        "device": (
            f"{options.device}, {options.precision}, {options.batch_tokens} tokens a batch, seed"
            f" {options.seed}"
        ),
        "out": str(options.out),
    }
    if options.trust_remote_code:
        rows["warning"] = f"the Python code that comes with {options.model} runs on this machine"
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())


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
        parallel = f", of column {options.text_column or DEFAULT_COLUMN}" if vector.parallel else ""
        kept = f"embedding {vector.width} wide ({vector.pooling}{length}{prompt}{parallel})"
    else:
        kept = f"logits {logits}"
    return (
        f"features  {kept}, hidden {options.hidden}, attention {options.attention}, "
        f"{counted(features.views, 'view')}, windows of at most {features.max_length} tokens"
    )
