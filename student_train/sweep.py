"""`student-sweep`: many students from one store, one after the other, and one table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from student_train.cli import GROUPS, parameters, told
from student_train.output.ranking import LOSS, SWEEP, Row, compares_losses, ranked, told_best
from student_train.settings.naming import beside
from student_train.settings.option_fields import ONCE, START
from student_train.settings.options import TrainOptions
from support import files
from support.console import CONTEXT, command_errors, wide_console
from support.errors import UserError
from support.grouped_help import GroupedCommand
from support.options import click_option, options_of, scoped
from support.signals import stoppable

if TYPE_CHECKING:
    from rich.table import Table

    from store import FeatureStore
    from student_train.output.run import Prepared

OUT_HELP = (
    "Folder of the students, each named after its settings, and of their table, which is"
    " sweep.json.  [default: beside the store, STORE-sweep for STORE.zarr]"
)
LOSS_HELP = "A comma list; repeated, it is another setting of the sweep, not one more loss."
COLUMNS = (
    "parameters",
    "steps",
    "seconds",
    "valid_loss",
    "valid_mlm",
    "valid_mlm_per_character",
    "valid_kl",
    "valid_hidden",
    "valid_accuracy",
    "valid_agreement",
    "valid_spearman",
)


@command_errors
def sweep(out: Path | None, store: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    """Train a student for every combination of the repeated options and compare them in one table,
    the best first.

    --loss is given once for each setting, as a comma list (--loss mlm=1 --loss mlm=1,hidden=3).
    Students that are finished already are not trained again.
    """
    from student_train.arguments import check_early, checked_from  # torch loads only for work

    say = partial(click.echo, err=as_json)
    folder = out or beside(store[0], "sweep")
    command = arguments.keys() & scoped(TrainOptions, ONCE)
    once = {"store": store, **{name: arguments.pop(name) for name in command}}
    varied = [name for name, values in arguments.items() if len(values) > 1]
    names = [name for name, values in arguments.items() if values]
    planned = []
    for values in itertools.product(*(arguments[name] for name in names)):
        given = dict(zip(names, values, strict=True))
        planned.append((given, checked_from({**once, **given})))
    for _, options in planned:
        check_early(options)
    planned = [(given, _in_folder(folder, options.resolved())) for given, options in planned]
    from student_train.output.run import open_stores

    rows: list[Row] = []
    with open_stores(planned[0][1]) as stores:
        starts = _check([options for _, options in planned], stores)
        for number, (given, options) in enumerate(planned, 1):
            settings = {name: str(given[name]) for name in varied}
            told = ", ".join(f"{name} {value}" for name, value in settings.items())
            name = options.out_folder().name
            prepared = starts.pop(options.out_folder(), None)
            heading = f"[{number}/{len(planned)}] {told or name}"
            report = _student(heading, options, stores, prepared, say)
            rows.append({**settings, "folder": name, **report["result"]})
    files.write(folder / SWEEP, json.dumps(rows, indent=1).encode())
    rows = ranked(rows)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        show(table(rows, varied))
    say(told_best(rows))
    say(f"students and {SWEEP} in {folder}")


def _in_folder(folder: Path, options: TrainOptions) -> TrainOptions:
    return replace(options, out=folder / options.name())


def _check(planned: list[TrainOptions], stores: list[FeatureStore]) -> dict[Path, Prepared]:
    """Refuse, before the first student is trained, whatever any of them could be refused for.

    A student of each distinct start is prepared for it; gives these, by their folders.
    """
    from student_train.output.report import learnt_from, read_report
    from student_train.output.run import prepare
    from student_train.train.checks import check

    starts = dict[tuple[Any, ...], TrainOptions]()
    contents = [store.manifest.content() for store in stores]
    for options in planned:
        check(options, *stores)
        before = read_report(options.out_folder())
        if before and learnt_from(before) != contents:
            raise UserError(f"{options.out} learnt from another store; give another --out")
        if not before or "result" not in before:
            start = sorted(scoped(TrainOptions, START))
            starts[tuple(getattr(options, name) for name in start)] = options
    return {each.out_folder(): prepare(each, *stores) for each in starts.values()}


def _student(
    told: str,
    options: TrainOptions,
    stores: list[FeatureStore],
    prepared: Prepared | None,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Train a student, or go on with it, where it is not finished; return its training.json."""
    from student_train.output.report import read_report
    from student_train.output.run import train_student
    from training.checkpoint import newest_checkpoint

    out = options.out_folder()

    def kept() -> str:
        return f"{out}: {newest_checkpoint(out / 'checkpoints')}; the same command goes on"

    report = read_report(out)
    if report and "result" in report:
        say(f"{told} (finished before)")
        return report
    say(told)
    with stoppable(kept):
        return train_student(options, stores, resume=report is not None, say=say, prepared=prepared)


def table(rows: Sequence[Row], varied: list[str]) -> list[list[str]]:
    """Return the headings, then a line for each student: what varied, then its results. The loss of
    the validation is one of them where it compares the students."""
    found = (name for name in COLUMNS if any(name in row for row in rows))
    apart = () if compares_losses(varied) else (LOSS.name,)  # side by side they would mislead
    columns = [*(varied or ["folder"]), *(name for name in found if name not in apart)]
    lines = [columns]
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        lines.append([told(c) if isinstance(c, (int, float)) else str(c) for c in cells])
    return lines


def show(lines: list[list[str]]) -> None:
    """Print a table: aligned at a terminal, in Markdown into a file or pipe."""
    console = wide_console()
    if console.is_terminal:
        console.print(aligned(lines))
        return
    for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]):
        click.echo(f"| {' | '.join(line)} |")


def aligned(lines: list[list[str]]) -> Table:
    """Make a table for a terminal of 80 columns: a word of a heading a line, and numbers
    unbroken."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in lines[0]:
        if heading in COLUMNS:
            made.add_column(heading.replace("_", "\n"), justify="right", no_wrap=True)
        else:
            made.add_column(heading, overflow="fold")
    for line in lines[1:]:
        made.add_row(*line)
    return made


def _command() -> click.Command:
    """Make the command of student-train's options. Each may be given several times, but for those
    that a sweep takes once."""
    varied = options_of(TrainOptions).keys() - scoped(TrainOptions, ONCE)
    found = {str(option.name): option for option in parameters(varied)}
    del found["allow_partial"]  # all students of a table learn from one text
    found["out"] = click_option(TrainOptions, "out", help=OUT_HELP)
    found["loss"].help = f"{LOSS_HELP} {found['loss'].help}"
    as_json = click.Option(
        ["--json", "as_json"],
        is_flag=True,
        help="Print the students as JSON in place of the table, and all else to stderr.",
    )
    return GroupedCommand(
        "student-sweep",
        groups=GROUPS,
        params=[*found.values(), as_json],
        callback=sweep,
        help=sweep.__doc__,
        context_settings=CONTEXT,
    )


main = _command()
