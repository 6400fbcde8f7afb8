"""The command `teacher-dump mixed-vocab`: trains a student's embeddings within the teacher."""

from __future__ import annotations

from typing import Any

import click

from support.console import CONTEXT, command_errors, counted
from support.options import click_option, options_of, read_words
from teacher_dump.job.options import DumpOptions
from teacher_dump.mixed_vocab.options import MixedVocabOptions

HELP = """Train a student's word embeddings within a masked-LM teacher, and keep them in a store.

The teacher goes on training on text whose words are segmented at random by its own vocabulary or
by the student's (Zhao et al. 2021). The student starts from what came of it, with no teacher:
student-train --store OUT --init mixed-vocab --loss mlm=1.

A training that was stopped goes on where it was: type the same command again.
"""
WORK: dict[str, dict[str, Any]] = {
    "seed": {"help": "Seed of words, masks, order, dropout and first embeddings."},
    "max_length": {
        "help": "Longest sequence in tokens, special ones included.",
        "default": 128,
        "show_default": True,
    },
    "batch_tokens": {},
    "device": {},
    "precision": {},
    "limit": {},
    "logits": {
        "help": "What the store keeps of the teacher, as teacher-dump does.",
        "default": "none",
        "show_default": True,
    },
    "hidden": {"default": "none"},
    "attention": {"default": "none"},
    "codec": {},
    "weights": {"help": "Keep the encoder's weights (fp16), too.", "default": False},
    "trust_remote_code": {},
}
"""Options of a dump that stage I takes as well, with what differs in it: help or default."""
PARAMETERS: list[click.Parameter] = [
    *(click_option(DumpOptions, name) for name in ("model", "out", "corpus", "text_column")),
    *(click_option(MixedVocabOptions, name) for name in options_of(MixedVocabOptions)),
    *(click_option(DumpOptions, name, **changes) for name, changes in WORK.items()),
]


@click.command(
    "mixed-vocab",
    help=HELP,
    short_help="Train a student's word embeddings within a teacher.",
    context_settings=CONTEXT,
    params=PARAMETERS,
)
@command_errors
def mixed_vocab(**given: Any) -> None:
    """Train a student's word embeddings within a masked-LM teacher."""
    own = {name: given.pop(name) for name in options_of(MixedVocabOptions)}
    asked = DumpOptions(**read_words(DumpOptions, given))
    options = MixedVocabOptions(asked, **own)
    from teacher_dump.mixed_vocab import stage_one  # torch and transformers load only for work

    done = stage_one.mixed_vocab(options, say=click.echo)
    click.echo(
        f"{asked.out}: {counted(done.tokens, 'token')} in {counted(done.sequences, 'sequence')} of"
        f" {counted(done.documents, 'document')}, and the student's embeddings"
    )
    click.echo(
        f"next: student-train --store {asked.out} --init mixed-vocab"
        f" --student {options.width}xLxA --loss mlm=1"
    )
