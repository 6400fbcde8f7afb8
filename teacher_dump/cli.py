"""`teacher-dump`: run the teacher once and keep what it knew."""

from __future__ import annotations

from typing import Any

import click

from support.console import CONTEXT, command_errors, counted
from teacher_dump.job import shared_options as shared
from teacher_dump.job.options import DumpOptions
from teacher_dump.mixed_vocab.cli import mixed_vocab
from training.rare_masks import MASK_WORDS

HELP = """Run a teacher once over a corpus and write what it knew about every token into a store.

A dump that was stopped continues where it was: type the same command again.
"""


class WithCommand(click.Command):
    """A command that is another one where its first word is the name of that."""

    other = mixed_vocab

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        if args[:1] != [self.other.name]:
            return super().make_context(info_name, args, parent, **extra)
        return self.other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(str(self.other.name), self.other.get_short_help_str(90))])


@click.command(cls=WithCommand, help=HELP, context_settings=CONTEXT)
@shared.model
@shared.corpus
@shared.out
@shared.text_column
@click.option(
    "--label-column",
    help="Column with the gold label, by name or number, for a teacher that classifies texts.",
)
@click.option(
    "--head",
    type=click.Choice(["auto", "mlm", "classification", "tagging", "causal", "none"]),
    default="auto",
    help=(
        "Head to read logits from; auto takes what the checkpoint was fine-tuned for"
        " (classification, tagging), else its masked-LM head."
    ),
)
@click.option(
    "--logits",
    help="Of an LM head: topk:K | sample:DRAWS | head | none.  [default: topk:64]",
)
@click.option(
    "--hidden",
    default="mean",
    help="mean | groups:N | layer:I (0 = embeddings) | none; a comma list for several.",
)
@click.option("--attention", default="mean", help="mean | groups:N | none.")
@click.option(
    "--views",
    default=1,
    help="Forward passes over each sequence; view 0 is plain, the others have words masked.",
)
@click.option("--mask-prob", default=0.15, help="Share of words masked in views 1, 2, ...")
@click.option(
    "--mask-words",
    type=click.Choice(MASK_WORDS),
    default="uniform",
    help="rare: a word is masked the more often the rarer it is in the corpus (views 1, 2, ...).",
)
@click.option("--seed", default=0, help="Seed of masks and draws.")
@shared.codec
@click.option(
    "--max-length",
    type=int,
    help=(
        "Longest window in tokens, special ones included.  [default: 256 or the teacher's own"
        " limit]"
    ),
)
@click.option("--stride", default=0, help="Tokens by which windows of one document overlap.")
@shared.batch_tokens
@shared.device
@shared.precision
@shared.limit
@click.option(
    "--weights/--no-weights",
    default=True,
    help="Keep the encoder's weights (fp16), from which students start.",
)
@shared.trust_remote_code
@command_errors
def main(**arguments: Any) -> None:
    from teacher_dump.job.dump import (
        dump,  # torch and transformers load only for work, not for --help
    )

    options = DumpOptions(corpus=shared.listed(arguments.pop("corpus")), **arguments)
    done = dump(options, say=click.echo)
    resumed = f" ({done.resumed_parts:,} of them from before)" if done.resumed_parts else ""
    click.echo(
        f"{options.out}: {counted(done.tokens, 'token')} in {counted(done.sequences, 'sequence')}"
        f" of {counted(done.documents, 'document')}, {counted(done.parts, 'part')}{resumed};"
        f" {counted(done.empty_lines, 'empty line')} skipped"
    )
    if done.task == "classification":
        click.echo(f"{counted(done.gold, 'sequence')} with a gold label")
    elif done.task == "tagging":
        click.echo(f"{counted(done.gold, 'token')} with a gold tag")
    if done.without_tokens:
        click.echo(f"{counted(done.without_tokens, 'window')} without any token left out")
    if done.task == "classification" and done.cut:
        click.echo(f"{counted(done.cut, 'document')} cut at the longest sequence (--max-length)")
    if done.surrogates:
        held = counted(done.surrogates, "character")
        click.echo(f"{held} that UTF-8 cannot hold replaced by U+FFFD")
    if done.halved:
        click.echo(f"{counted(done.halved, 'time')} a batch did not fit into the memory: halved")
    if done.widened:
        click.echo(f"{counted(done.widened, 'time')} NaN or infinity came: run in float32")
    click.echo(f"next: student-train --store {options.out} --vocab {done.vocab}")
