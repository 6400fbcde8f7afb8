"""`student-sweep`: many students from one store, one after the other, and one table."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from student_train.cli import DEFAULT, told
from student_train.cli import main as student_train
from student_train.settings.options import TrainOptions, beside
from support import files
from support.console import CONTEXT, command_errors, wide_console
from support.errors import UserError
from support.signals import stoppable

if TYPE_CHECKING:
    from rich.table import Table

SINGLE = ("out", "resume", "store", "workers", "cache")
OUT_HELP = (
    "Folder of the students, each named after its settings, and of sweep.json, the table."
    "  [default: beside the store, STORE-sweep for STORE.zarr]"
)
OF_START = ("vocab", "student", "init", "word_vectors", "max_length")
"""Options that only the making of a student can refuse."""
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
)


@command_errors
def sweep(
    out: Path | None,
    store: tuple[str, ...],
    workers: int | None,
    cache: str | None,
    **repeated: tuple[Any, ...],
) -> None:
    """Train a student for every combination of the repeated options and compare them in one table.

    --loss is given once for each setting, as a comma list (--loss mlm=1 --loss mlm=1,hidden=3).
    Students that are finished already are not trained again.
    """
    from student_train.settings.arguments import options_of

    folder = out or beside(store[0], "sweep")
    once = {"store": store, "out": None, "workers": workers or 0, "cache": cache}
    varied = [name for name, values in repeated.items() if len(values) > 1]
    names = [name for name, values in repeated.items() if values]
    rows, planned = [], list[tuple[dict[str, Any], TrainOptions]]()
    for values in itertools.product(*(repeated[name] for name in names)):
        arguments = dict(zip(names, values, strict=True))
        arguments["loss"] = (arguments["loss"],) if "loss" in arguments else ()
        planned.append((arguments, options_of({**once, **arguments})))
    _check(folder, store, [options for _, options in planned])
    for number, (arguments, options) in enumerate(planned, 1):
        told = ", ".join(f"{name} {_told(arguments[name])}" for name in varied) or options.name()
        report = _student(f"[{number}/{len(planned)}] {told}", folder / options.name(), options)
        rows.append(
            {
                **{name: _told(arguments[name]) for name in varied},
                "folder": options.name(),
                **report["result"],
            }
        )
    files.write(folder / "sweep.json", json.dumps(rows, indent=1).encode())
    show(table(rows, varied))
    click.echo(f"students and sweep.json in {folder}")


def _check(folder: Path, paths: tuple[str, ...], planned: list[TrainOptions]) -> None:
    """Refuse, before the first student is trained, whatever any of them could be refused for."""
    from store import open_store
    from student_train.output.report import learnt_from, read_report
    from student_train.output.run import prepare
    from student_train.train.checks import check

    starts = dict[tuple[Any, ...], TrainOptions]()
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(open_store(path))) for path in paths]
        contents = [store.manifest.content() for store in stores]
        for options in planned:
            check(options, *stores)
            before = read_report(folder / options.name())
            if before and learnt_from(before) != contents:
                raise UserError(
                    f"{folder / options.name()} learnt from another store; give another --out"
                )
            if not before or "result" not in before:
                starts[tuple(getattr(options, name) for name in OF_START)] = options
        for options in starts.values():
            prepare(options, *stores)


def _student(told: str, target: Path, options: TrainOptions) -> dict[str, Any]:
    """Train a student, or go on with it, where it is not finished; what its training.json says."""
    from student_train.output.report import read_report
    from student_train.output.run import run
    from student_train.train.checkpoint import newest_checkpoint

    def kept() -> str:
        return f"{target}: {newest_checkpoint(target / 'checkpoints')}; the same command goes on"

    report = read_report(target)
    if report and "result" in report:
        click.echo(f"{told} (finished before)")
        return report
    click.echo(told)
    with stoppable(kept):
        return run(replace(options, out=target), resume=report is not None, say=click.echo)


def _told(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def table(rows: list[dict[str, Any]], varied: list[str]) -> list[list[str]]:
    """The headings, then a line for each student: what varied, then its results."""
    columns = [
        *(varied or ["folder"]),
        *(name for name in COLUMNS if any(name in row for row in rows)),
    ]
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
    """A table for a terminal of 80 columns: a word of a heading a line, and numbers unbroken."""
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


def _help(option: click.Option) -> str:
    """That of student-train, with the default, which a repeatable option itself does not have."""
    if option.name == "out":
        return OUT_HELP
    default = getattr(DEFAULT, option.name or "", None)
    told = isinstance(default, (str, int, float)) and option.name not in SINGLE
    return f"{option.help}  [default: {default}]" if told else str(option.help)


def _command() -> click.Command:
    """Student-train's own options, each of which may be repeated."""
    options: list[click.Parameter] = []
    for option in student_train.params:
        assert isinstance(option, click.Option)
        if option.name in ("resume", "allow_partial"):
            continue
        options.append(
            click.Option(
                [*option.opts, *(f" /{name}" for name in option.secondary_opts)],
                type=option.type,
                required=option.required,
                multiple=option.multiple or option.name not in SINGLE,
                help=_help(option),
                callback=option.callback,
                is_eager=option.is_eager,
            )
        )
    return click.Command(
        "student-sweep",
        params=options,
        callback=sweep,
        help=sweep.__doc__,
        context_settings=CONTEXT,
    )


main = _command()
