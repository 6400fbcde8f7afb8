"""The command `teacher-dump`: runs the teacher once and stores its output."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from teachonce.support.commands import GroupedCommandWithSubcommands, examples, version_option
from teachonce.support.console import CONTEXT, command_errors, counted
from teachonce.support.environment import is_main_process
from teachonce.support.options import click_options, read_words
from teachonce.teacher_dump.job.option_values import ProcessShard, shard_of
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.mixed_vocab.cli import mixed_vocab

if TYPE_CHECKING:
    from teachonce.teacher_dump.job.dump import DumpSummary

HELP = """Run a teacher once over a corpus; write logits, hidden states and attention to a store.

To continue a stopped dump, run the same command again.
"""
EXAMPLES = examples(
    "teacher-dump --model google-bert/bert-base-cased --corpus texts.txt --out store.zarr",
    "teacher-dump --model my-teacher --corpus texts.txt --out store.zarr --logits topk:8 --plan",
)

GROUPS = {
    "The ten that matter most": (
        *("model", "out", "corpus", "text_column", "head"),
        *("logits", "hidden", "attention", "limit", "plan"),
    ),
    "Text": (
        *("label_column", "student_column", "prompt", "messages", "learn"),
        *("bos", "max_length", "stride"),
    ),
    "A corpus that has grown": ("grow_from", "gone"),
    "Stored data": ("pooling", "codec", "weights"),
    "Views": ("views", "mask_prob", "mask_words", "seed"),
    "Running the teacher": ("gguf", "batch_tokens", "device", "precision", "trust_remote_code"),
    "Several processes": ("shard", "ray", "ray_gpus"),
}
"""Headings of --help, and the options under each."""


@click.group(
    cls=GroupedCommandWithSubcommands,
    groups=GROUPS,
    help=HELP,
    epilog=EXAMPLES,
    context_settings=CONTEXT,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND ...]",
    params=click_options(DumpOptions),
)
@version_option
@command_errors
def main(**given: Any) -> None:
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        # A subcommand does not see options in front of its name. Checking --model suffices: click
        # requires it with any of them.
        if given["model"] is not None:
            raise click.UsageError(
                f"give the options after the subcommand {context.invoked_subcommand}"
            )
        return
    options = DumpOptions(**read_words(DumpOptions, given))
    if options.plan:
        if is_main_process():
            _plan(options)
        return
    if options.ray is not None:
        _share_on_ray(options)
        return
    if shard := shard_of(options.shard):
        _share(options, shard)
        return
    from teachonce.teacher_dump.job.dump import dump  # loads torch only for work, not for --help

    _report(options, dump(options, say=click.echo))


def _plan(options: DumpOptions) -> None:
    """Print the estimated size and time of a dump. Raises UserError if the disk is too small."""
    from teachonce.teacher_dump.job.estimate import estimate

    estimated = estimate(options, say=click.echo)
    # The table is printed first: it shows what to leave out when the disk is too small.
    for line in estimated.lines():
        click.echo(line)
    estimated.check_room(options.out)


def _share(options: DumpOptions, shard: ProcessShard) -> None:
    """Write a store together with other processes, and print what this process wrote."""
    from teachonce.teacher_dump.job.sharing import share

    # Under torchrun each process would print the same settings: only rank 0 does.
    done = share(options, shard, say=click.echo if is_main_process() else lambda line: None)
    click.echo(
        f"{options.out}: is finished; process {shard.place} of {shard.size} wrote"
        f" {counted(done.parts, 'part')} with {counted(done.tokens, 'teacher token')}"
    )
    if done.store:
        # `resumed_parts` would count the parts of the other processes as written earlier.
        _report(options, replace(done.store, resumed_parts=0))


def _share_on_ray(options: DumpOptions) -> None:
    """Dump with the workers of a Ray cluster, and print what the store holds."""
    from teachonce.teacher_dump.job.on_ray import share_on_ray

    done, before = share_on_ray(options, say=click.echo)
    # A worker counts the parts of other workers as written earlier; only the driver counted before.
    if done.store:
        _report(options, replace(done.store, resumed_parts=before))
    else:
        click.echo(f"{options.out}: is finished")


def _report(options: DumpOptions, done: DumpSummary) -> None:
    """Print what a finished store holds, and the next command."""
    following = f"next: student-train --store {quote(str(options.out))} {done.student}"
    # Only the run that wrote the store has counted its empty lines, gold labels and cut texts.
    if done.finished_before:
        click.echo(following)
        return
    resumed = f" ({done.resumed_parts:,} of them written earlier)" if done.resumed_parts else ""
    click.echo(
        f"{options.out}: {counted(done.tokens, 'teacher token')} in"
        f" {counted(done.sequences, 'sequence')} of {counted(done.documents, 'document')},"
        f" {counted(done.parts, 'part')}{resumed};"
        f" {counted(done.empty_lines, 'empty line')} skipped"
    )
    if done.gold_task:
        unit, label = ("token", "tag") if done.gold_task == "tagging" else ("sequence", "label")
        unnamed = (
            ""
            if done.gold or options.label_column
            else "; for the labels of a table give --label-column"
        )
        click.echo(f"{counted(done.gold, unit)} with a gold {label}{unnamed}")
    if done.gold_task and not done.gold and options.limit and len(options.corpus) > 1:
        click.echo(
            f"no text with a gold label or tag came before --limit {options.limit}: if a --corpus"
            " has them, give it first"
        )
    if done.without_tokens:
        click.echo(f"left out: {counted(done.without_tokens, 'window')} without any token")
    # At least 0.1 %: a smaller share would be printed as 0.0 %, although texts were cut.
    if done.cut:
        click.echo(
            f"{done.cut:,} of {counted(done.read, 'text')} longer than the window (--max-length)"
            f" and cut: {max(done.lost, 0.001):.1%} of all characters left out"
        )
    if done.surrogates:
        held = counted(done.surrogates, "character")
        click.echo(f"replaced by U+FFFD: {held} that UTF-8 cannot encode")
    if done.halved:
        click.echo(f"halved {counted(done.halved, 'time')}: a batch that did not fit into memory")
    if done.widened:
        sequences = counted(done.widened, "sequence")
        click.echo(f"run again in float32: {sequences} with NaN or infinity")
    if done.unread:
        click.echo(f"unread: {done.unread}")
    click.echo(following)


main.add_command(mixed_vocab)
