"""The command `teacher-dump mixed-vocab`: trains a student's embeddings within the teacher."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from teachonce.support.click_types import Names
from teachonce.support.commands import GroupedCommand, examples, is_given
from teachonce.support.console import CONTEXT, command_errors, counted
from teachonce.support.options import click_option, click_options, options_of, read_words
from teachonce.teacher_dump.mixed_vocab.options import (
    ONLY_DUMP,
    RECIPES,
    MixedVocabOptions,
    StageOneDump,
)

HELP = """Train a student's word embeddings within a masked-LM teacher, and write them to a store.

The teacher is trained further on text whose words are segmented at random by its own vocabulary or
by the student's (Zhao et al. 2021). A student is then trained from these embeddings without the
teacher: student-train --store OUT --init mixed-vocab --loss mlm=1.

--recipe sets the options that Zhao et al. published; options on the command line override them.

To continue a stopped training, run the same command again.
"""
EXAMPLES = examples(
    "teacher-dump mixed-vocab --model my-teacher --corpus texts.txt --width 264 --out mixed.zarr",
    "teacher-dump mixed-vocab --model google-bert/bert-base-uncased --recipe zhao-mixed"
    " --width 192 --out mixed.zarr",
)

GROUPS = {
    "The ten that matter most": (
        *("model", "out", "corpus", "recipe", "vocab"),
        *("width", "steps", "lr", "tie", "limit"),
    ),
    "Training": (
        *("warmup", "accumulate", "student_share", "mask_prob", "optimizer", "batch_tokens"),
        *("checkpoint_every", "seed"),
    ),
    "Text": ("text_column", "max_length"),
    "Stored data": ("logits", "hidden", "attention", "codec", "weights"),
    "Running the teacher": ("device", "precision", "trust_remote_code"),
}
"""Headings of --help, and the options under each."""


def _parameters() -> list[click.Parameter]:
    """Return the options: input and output of the dump, the training, then the rest of the dump."""
    shared = [name for name in options_of(StageOneDump) if name not in ONLY_DUMP]
    first = ("model", "out", "corpus", "text_column")
    return [
        *(click_option(StageOneDump, name) for name in first),
        click.Option(
            ["--recipe"],
            type=Names(tuple(RECIPES)),
            help="Use the options of Zhao et al. 2021; student-train has a recipe of the same name"
            " for the student itself (stage II).",
        ),
        *click_options(MixedVocabOptions),
        *(click_option(StageOneDump, name) for name in shared if name not in first),
    ]


@click.command(
    "mixed-vocab",
    cls=GroupedCommand,
    groups=GROUPS,
    help=HELP,
    epilog=EXAMPLES,
    short_help="Train a student's word embeddings within a teacher.",
    context_settings=CONTEXT,
    params=_parameters(),
)
@command_errors
def mixed_vocab(recipe: str | None, **given: Any) -> None:
    """Train a student's word embeddings within a masked-LM teacher."""
    for name, value in RECIPES.get(recipe or "", {}).items():
        if not is_given(name):
            given[name] = value
    training_options = {name: given.pop(name) for name in options_of(MixedVocabOptions)}
    dump = StageOneDump(**read_words(StageOneDump, given))
    options = MixedVocabOptions(dump, **training_options)
    from teachonce.teacher_dump.mixed_vocab import (
        stage_one,  # torch and transformers load only for work
    )

    done = stage_one.mixed_vocab(options, say=click.echo)
    if done is None:  # under torchrun only rank 0 prints
        return
    click.echo(
        f"{dump.out}: {counted(done.tokens, 'teacher token')} in"
        f" {counted(done.sequences, 'sequence')} of {counted(done.documents, 'document')},"
        " and the student's embeddings"
    )
    click.echo(
        f"next: student-train --store {quote(str(dump.out))} --init mixed-vocab"
        f" --student {options.width}xLxA --loss mlm=1"
    )
