"""`student-sweep`: many students from one store, one after the other, and one table."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from store.console import CONTEXT, command_errors
from store.errors import UserError
from store.stopping import stoppable
from student_train.cli import DEFAULT, options_of, told
from student_train.cli import main as student_train
from student_train.options import TrainOptions, beside

SINGLE = ("out", "resume", "store", "workers")
OUT_HELP = (
    "Folder of the students, each named after its settings, and of sweep.json, the table."
    "  [default: beside the store, STORE-sweep for STORE.zarr]"
)
COLUMNS = (
    "parameters",
    "steps",
    "seconds",
    "valid_loss",
    "valid_mlm",
    "valid_mlm_per_character",
    "valid_kl",
    "valid_hidden",
)


@command_errors
def sweep(out: Path | None, store: str, workers: int | None, **repeated: tuple[Any, ...]) -> None:
    """Train a student for every combination of the repeated options and compare them in one table.

    --loss is given once for each setting, as a comma list (--loss mlm=1 --loss mlm=1,hidden=3).
    Students that are finished already are not trained again.
    """
    from store import open_store
    from student_train.report import read_report
    from student_train.run import check

    folder = out or beside(store, "sweep")
    source = open_store(store)
    content = source.manifest.content()
    once = {"store": store, "out": None, "workers": workers or 0}
    varied = [name for name, values in repeated.items() if len(values) > 1]
    names = [name for name, values in repeated.items() if values]
    rows, planned = [], []
    for values in itertools.product(*(repeated[name] for name in names)):
        arguments = dict(zip(names, values, strict=True))
        arguments["loss"] = (arguments["loss"],) if "loss" in arguments else ()
        options = options_of({**once, **arguments})
        check(options, source)  # all of them before the first is trained
        before = read_report(folder / options.name())
        if before and before["store"]["content"] != content:
            raise UserError(
                f"{folder / options.name()} learnt from another store; give another --out"
            )
        planned.append((arguments, options))
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
    (folder / "sweep.json").write_text(json.dumps(rows, indent=1))
    click.echo(table(rows, varied))
    click.echo(f"students and sweep.json in {folder}")


def _student(told: str, target: Path, options: TrainOptions) -> dict[str, Any]:
    """Train a student, or go on with it, where it is not finished; what its training.json says."""
    from student_train.checkpoint import newest_checkpoint
    from student_train.report import read_report
    from student_train.run import run

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


def table(rows: list[dict[str, Any]], varied: list[str]) -> str:
    """Markdown table of the students: what varied, then their results."""
    columns = [
        *(varied or ["folder"]),
        *(name for name in COLUMNS if any(name in row for row in rows)),
    ]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        lines.append([told(c) if isinstance(c, (int, float)) else str(c) for c in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
                option.opts,
                type=option.type,
                required=option.required,
                multiple=option.name not in SINGLE,
                help=_help(option),
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
