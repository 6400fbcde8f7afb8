"""The whole command `feature-store`: the store's own commands, and `verify` with a teacher.

The store runs no model, so the option `--model` of `verify` is added here.
"""

from __future__ import annotations

import click

from store import cli
from store.errors import StoreError
from support.console import CONTEXT, command_errors, counted


@click.command()
@click.argument("path")
@cli.allow_partial
@click.option("--model", help="Also run a sample through this teacher (as for teacher-dump).")
@click.option(
    "--sample", default=64, type=click.IntRange(min=1), help="Sequences that --model runs."
)
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Which sequences.")
@click.option("--device", default="auto", help="Of --model: auto | cpu | cuda | cuda:N.")
@command_errors
def verify(
    path: str, allow_partial: bool, model: str | None, sample: int, seed: int, device: str
) -> None:
    """Read everything and compare it with its checksums.

    The stored tokens are compared with those of the stored tokenizer. With --model the teacher runs
    over a sample, and its output is compared with what is stored. Exit code 1 if anything is wrong;
    files and objects that do not belong to the store are told, and are not wrong.
    """
    cli.check_sound(path, allow_partial)
    if model is not None:
        _check_teacher(path, allow_partial, model, sample, seed, device)


def _check_teacher(
    path: str, allow_partial: bool, model: str, sample: int, seed: int, device: str
) -> None:
    """Compare a sample with the teacher's output and print the errors; StoreError if it differs."""
    from store.read.store import open_store
    from teacher_dump.comparison.rerun import check

    found = check(open_store(path, allow_partial=allow_partial), model, sample, seed, device)
    click.echo(found.headline)
    click.echo(f"{'':<28} {'largest':>9} {'mean':>9} {'promised':>9}  share of what is allowed")
    for row in found.rows:
        click.echo(
            f"{row.feature:<28} {row.largest:9.3g} {row.mean:9.3g} {row.promised:9.3g} "
            f"{row.share:6.2f}  ({row.unit})"
        )
    for line in (*found.notes, *found.problems):
        click.echo(line)
    if found.problems:
        raise StoreError(
            f"{path}: is not what {model} says: {counted(len(found.problems), 'problem')}; give the"
            " model that it was made with, or dump again"
        )
    click.echo(f"{path}: every error is within what its codec and {model} promise")


main = click.Group(
    "main",
    {**cli.main.commands, "verify": verify},
    help=cli.main.help,
    context_settings=CONTEXT,
)
