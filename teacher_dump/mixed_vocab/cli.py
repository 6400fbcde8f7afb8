"""`teacher-dump mixed-vocab`: train the teacher with a student's vocabulary beside its own."""

from __future__ import annotations

from typing import Any

import click

from support.console import CONTEXT, command_errors, counted
from teacher_dump.job import shared_options as shared
from teacher_dump.job.options import DumpOptions
from training.optimizer import OPTIMIZERS

HELP = """Train a student's word embeddings within a masked-LM teacher, and keep them in a store.

The teacher goes on training on text whose words are segmented at random by its own vocabulary or
by the student's (Zhao et al. 2021). The student starts from what came of it, with no teacher:
student-train --store OUT --init mixed-vocab --loss mlm=1.

A training that was stopped goes on where it was: type the same command again.
"""
OWN = ("vocab", "width", "steps", "lr", "student_share", "mask_prob", "optimizer")


@click.command("mixed-vocab", help=HELP, context_settings=CONTEXT)
@shared.model
@shared.corpus
@click.option(
    "--vocab",
    default="5k",
    help="The student's: 5k | N (WordPiece of the corpus) | a tokenizer folder.",
)
@click.option("--width", required=True, type=int, help="Of the student and its word embeddings.")
@shared.out
@shared.text_column
@click.option("--steps", default=2000, help="Optimiser steps.")
@click.option("--lr", default=1e-4, help="Peak learning rate: 5 % warm-up, then linear to 0.")
@click.option(
    "--student-share", default=0.5, help="Share of words segmented by the student's vocabulary."
)
@click.option(
    "--mask-prob",
    default=0.15,
    help="Share of pieces masked: at most 20 of a sequence, at most 10 of these the teacher's.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    default="adamw",
    help="lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`.",
)
@click.option("--seed", default=0, help="Of words, masks, order, dropout and first embeddings.")
@click.option(
    "--max-length", default=128, help="Longest sequence in tokens, special ones included."
)
@shared.batch_tokens
@click.option("--checkpoint-every", default=500, help="Steps between checkpoints.")
@shared.device
@shared.precision
@shared.limit
@click.option(
    "--logits", default="none", help="What the store keeps of the teacher, as teacher-dump does."
)
@click.option("--hidden", default="none", help="mean | groups:N | layer:I | none.")
@click.option("--attention", default="none", help="mean | groups:N | none.")
@shared.codec
@click.option(
    "--weights/--no-weights", default=False, help="Keep the encoder's weights (fp16), too."
)
@shared.trust_remote_code
@command_errors
def mixed_vocab(checkpoint_every: int, **arguments: Any) -> None:
    """Train a student's word embeddings within a masked-LM teacher."""
    from teacher_dump.mixed_vocab import stage_one  # torch and transformers load only for work

    own = {name: arguments.pop(name) for name in OWN}
    asked = DumpOptions(corpus=shared.listed(arguments.pop("corpus")), **arguments)
    options = stage_one.MixedVocabOptions(asked, checkpoint_every=checkpoint_every, **own)
    done = stage_one.mixed_vocab(options, say=click.echo)
    click.echo(
        f"{asked.out}: {counted(done.tokens, 'token')} in {counted(done.sequences, 'sequence')} of"
        f" {counted(done.documents, 'document')}, and the student's embeddings"
    )
    click.echo(
        f"next: student-train --store {asked.out} --init mixed-vocab"
        f" --student {options.width}xLxA --loss mlm=1"
    )
