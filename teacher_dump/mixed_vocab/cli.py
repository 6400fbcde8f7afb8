"""The command `teacher-dump mixed-vocab`: trains a student's embeddings within the teacher."""

from __future__ import annotations

from typing import Any

import click

from teachonce.support.console import CONTEXT, command_errors, counted
from teachonce.support.grouped_help import GroupedCommand
from teachonce.support.options import click_option, click_options, options_of, read_words
from teachonce.teacher_dump.mixed_vocab.options import (
    DUMP_ALONE,
    RECIPES,
    MixedVocabOptions,
    StageOneDump,
)

HELP = """Train a student's word embeddings within a masked-LM teacher, and keep them in a store.

The teacher goes on training on text whose words are segmented at random by its own vocabulary or
by the student's (Zhao et al. 2021). The student starts from what came of it, with no teacher:
student-train --store OUT --init mixed-vocab --loss mlm=1.

--recipe sets the options that Zhao et al. published, but for those that are given.

A training that was stopped goes on where it was: type the same command again.
"""


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
    "What is kept": ("logits", "hidden", "attention", "codec", "weights"),
    "Running the teacher": ("device", "precision", "trust_remote_code"),
}
"""Headings of --help, and the options under each."""


def _parameters() -> list[click.Parameter]:
    """The options of the dump that name its input and output, those of the training, the others."""
    shared = [name for name in options_of(StageOneDump) if name not in DUMP_ALONE]
    first = ("model", "out", "corpus", "text_column")
    return [
        *(click_option(StageOneDump, name) for name in first),
        click.Option(
            ["--recipe"],
            type=click.Choice(tuple(RECIPES)),
            help="Options as published; student-train has the recipe of stage II by that name.",
        ),
        *click_options(MixedVocabOptions),
        *(click_option(StageOneDump, name) for name in shared if name not in first),
    ]


@click.command(
    "mixed-vocab",
    cls=GroupedCommand,
    groups=GROUPS,
    help=HELP,
    short_help="Train a student's word embeddings within a teacher.",
    context_settings=CONTEXT,
    params=_parameters(),
)
@click.pass_context
@command_errors
def mixed_vocab(context: click.Context, /, recipe: str | None, **given: Any) -> None:
    """Train a student's word embeddings within a masked-LM teacher."""
    for name, value in RECIPES.get(recipe or "", {}).items():
        if context.get_parameter_source(name) == click.core.ParameterSource.DEFAULT:
            given[name] = value
    own = {name: given.pop(name) for name in options_of(MixedVocabOptions)}
    asked = StageOneDump(**read_words(StageOneDump, given))
    options = MixedVocabOptions(asked, **own)
    from teachonce.teacher_dump.mixed_vocab import (
        stage_one,  # torch and transformers load only for work
    )

    done = stage_one.mixed_vocab(options, say=click.echo)
    if done is None:  # another process of torchrun speaks
        return
    click.echo(
        f"{asked.out}: {counted(done.tokens, 'token')} in {counted(done.sequences, 'sequence')} of"
        f" {counted(done.documents, 'document')}, and the student's embeddings"
    )
    click.echo(
        f"next: student-train --store {asked.out} --init mixed-vocab"
        f" --student {options.width}xLxA --loss mlm=1"
    )
