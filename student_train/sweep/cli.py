"""`student-sweep`: trains many students from one store and compares them in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from teachonce.student_train.cli import parameters
from teachonce.student_train.settings.option_fields import ONCE
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.space import overridden, read_space, varied
from teachonce.support import files
from teachonce.support.click_types import LocalPath, Names
from teachonce.support.commands import OneLineCommand, examples, is_given, version_option
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError
from teachonce.support.options import click_option, options_of, scoped
from teachonce.support.packages import check_library
from teachonce.support.ray_cluster import AUTO, check_address, check_gpus

OUT_HELP = (
    "Write the students to this folder, each named after the settings that vary, and their table"
    " (sweep.json).  [default: STORE-sweep next to STORE.zarr]"
)
EXAMPLES = examples(
    "student-sweep --store store.zarr --vocab 5k --vocab 10k --loss mlm=1 --loss mlm=1,hidden=30",
    "student-sweep --store store.zarr --student 128x2x2 --lr 1e-3 --lr 3e-3 --jobs 2",
)
OF_SWEEP = (
    click.Option(
        ["--grid"],
        type=LocalPath(),
        help="Read a list of settings for each option from FILE.toml; options on the command line"
        " override it.",
    ),
    click.Option(
        ["--trials"],
        type=click.IntRange(min=1),
        help="Search the settings in N trials with Optuna; trials worse than the median at a"
        " validation are stopped. Numbers in --grid may be ranges:"
        " lr = {low = 1e-4, high = 1e-2, log = true}.",
    ),
    click.Option(
        ["--jobs"],
        type=click.IntRange(min=1),
        help="Train N students at once, each in its own process and, if there are several GPUs, on"
        " its own GPU.  [default: one after the other, in this process]",
    ),
    click.Option(
        ["--prune"],
        type=Names(("median", "asha", "none")),
        help="Stop students early at a validation. median: if half of the trials were better at"
        " that step. asha: if at its 1st, 3rd, 9th, ... validation it is not among the best third"
        " of the students that reached it. Both need Optuna: `pip install 'teachonce[tune]'`."
        "  [default: median with --trials, else none]",
    ),
    click.Option(
        ["--ray"],
        is_flag=False,
        flag_value=AUTO,
        metavar="[ADDRESS]",
        help="Train on a Ray cluster, with a disk that all nodes share: HOST:PORT, local (start a"
        " cluster on this machine for this sweep), or no value: the cluster of RAY_ADDRESS or of"
        " this machine, else local. Needs `pip install 'teachonce[ray]'`.",
    ),
    click.Option(
        ["--ray-gpus"],
        type=click.FloatRange(min=0),
        help="With --ray: give each student N GPUs; with 0.5 two students share one.  [default: 1"
        " if the cluster has any and --device is not cpu, else 0]",
    ),
    click.Option(
        ["--downstream"],
        type=LocalPath(),
        help="Score each student, and each model of [models], on the tasks of FILE.toml: tables"
        " [tasks.NAME] with options of downstream.",
    ),
    click.Option(
        ["--page"],
        type=LocalPath(),
        help="Only write index.html of a sweep's folder; the sweep may still be running.",
    ),
    click.Option(
        ["--json", "as_json"],
        is_flag=True,
        help="Print the students as JSON instead of the table, and messages to stderr.",
    ),
)
OF_SWEEP_NAMES = ("grid", "trials", "prune", "jobs", "ray", "ray_gpus", "downstream", "page")
REPEATED = "repeated or a comma-separated list"
IN_SWEEP = "a comma-separated list; each repetition is another setting of the sweep"
"""How the help of --loss describes repetition: in student-train, and in student-sweep."""


@command_errors
def sweep(page: Path | None, as_json: bool, **arguments: Any) -> None:
    """Train a student for every combination of the repeated options and compare them in one table,
    the best first.

    Give --loss once for each setting, as a comma-separated list (--loss mlm=1 --loss
    mlm=1,hidden=3). --grid FILE.toml has lists of settings, and with --trials N also ranges to
    search. Finished students are not trained again; a student that fails does not stop the others.
    """
    say = partial(click.echo, err=as_json)
    if page:
        _check_page_alone()
        from teachonce.student_train.sweep.page.report import write_report

        say(f"page in {write_report(page)}")
        return
    options = {name: arguments.pop(name) for name in OF_SWEEP_NAMES if name != "page"}
    _check(options, arguments["store"])
    folder = arguments.pop("out")
    if folder is not None:
        _check_out(Path(folder))
    once = {"store"} | arguments.keys() & scoped(TrainOptions, ONCE)
    fixed = {name: arguments.pop(name) for name in once}
    grid = options.pop("grid")
    space = overridden(read_space(grid, list(arguments)) if grid else {}, arguments)
    if options["trials"] and not varied(space):
        raise UserError(
            "--trials: no setting varies; give ranges or lists in --grid FILE.toml, or an option"
            " twice"
        )
    from teachonce.student_train.sweep.job import Sweep

    Sweep(folder, fixed, space, f"{grid}: ", **options).run(say, as_json)


def _check_page_alone() -> None:
    """Raise UserError if `--page` is given with other options, which it does not read."""
    params = click.get_current_context().command.params
    names = {str(each.name): each.opts[0] for each in params}
    if given := [name for name in names if name != "page" and is_given(name)]:
        raise UserError(
            "--page writes the page into the folder of its sweep, and reads no other option; leave"
            f" {', '.join(names[name] for name in given)} out"
        )


def _check_out(folder: Path) -> None:
    """Raise UserError for a file, and for the folder of a student or a store."""
    if files.is_taken(folder) and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; give another name")
    for file, kind in (("training.json", "student"), ("zarr.json", "store")):
        if (folder / file).exists():
            raise UserError(f"--out {folder}: is the folder of a {kind}; give another folder")


def _check(options: Mapping[str, Any], stores: Sequence[str]) -> None:
    """Raise UserError for options that contradict one another, or need what is not installed."""
    if not stores:
        raise UserError("--store: give the store on which the students are trained")
    ray, gpus, prune = options["ray"], options["ray_gpus"], options["prune"]
    if ray is None and gpus is not None:
        raise UserError(
            f"--ray-gpus {gpus:g}: applies only to students on Ray; add --ray, or leave --ray-gpus"
            " out"
        )
    if ray is not None:
        check_address(ray)
        check_gpus(gpus or 0)
        if options["jobs"] is not None:
            raise UserError(
                f"--jobs {options['jobs']} and --ray contradict each other: Ray trains as many"
                " students at once as its nodes have room for; leave --jobs out"
            )
    if prune == "median" and not options["trials"]:
        raise UserError("--prune median: applies only to a search; add --trials N")
    if options["trials"] or prune == "asha":
        check_library("optuna", "tune", "--trials" if options["trials"] else "--prune asha")


class SweepCommand(OneLineCommand):
    """Explains in --help what a sweep adds to student-train, and names the other options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for the sweep's options, and one for the names of student-train's."""
        options = {str(each.name): each for each in self.get_params(ctx)}
        train = options.keys() & options_of(TrainOptions).keys() - {"store", "out"}
        records = [options[name].get_help_record(ctx) for name in options if name not in train]
        with formatter.section("The sweep"):
            formatter.write_dl([record for record in records if record])
        once = train & scoped(TrainOptions, ONCE)
        with formatter.section("Options of student-train, which `student-train --help` explains"):
            for heading, names in (
                ("Repeat any of these to compare settings:", train - once),
                ("Each student has the same:", once),
            ):
                words = ", ".join(options[name].opts[0] for name in options if name in names)
                # click's own wrapping breaks --batch-tokens after a hyphen.
                lines = wrap(f"{heading} {words}", formatter.width - 4, break_on_hyphens=False)
                formatter.write("".join(f"  {line}\n" for line in lines))


def _command() -> click.Command:
    """Make the command from student-train's options. Options without the scope `ONCE` may be
    repeated."""
    varied = options_of(TrainOptions).keys() - scoped(TrainOptions, ONCE)
    options = {str(option.name): option for option in parameters(varied)}
    del options["allow_partial"]  # all students of a table must be trained on the same text
    options["out"] = click_option(TrainOptions, "out", help=OUT_HELP)
    options["store"].required = False  # --page needs no store
    options["loss"].help = (options["loss"].help or "").replace(REPEATED, IN_SWEEP)
    return SweepCommand(
        "student-sweep",
        params=[*options.values(), *OF_SWEEP],
        callback=sweep,
        help=sweep.__doc__,
        epilog=EXAMPLES,
        context_settings=CONTEXT,
    )


main = version_option(_command())
