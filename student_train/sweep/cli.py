"""`student-sweep`: many students from one store, one after the other, and one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from teachonce.student_train.cli import GROUPS, parameters
from teachonce.student_train.settings.option_fields import ONCE
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.space import over, read_space, varied
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError
from teachonce.support.extras import check_library
from teachonce.support.grouped_help import GroupedCommand
from teachonce.support.options import click_option, options_of, scoped
from teachonce.support.ray_cluster import AUTO, check_address, check_gpus

OUT_HELP = (
    "Folder of the students, each named after its settings, and of their table, which is"
    " sweep.json.  [default: beside the store, STORE-sweep for STORE.zarr]"
)
FILE = click.Path(path_type=Path)
OF_SWEEP = (
    click.Option(
        ["--grid"],
        type=FILE,
        help="FILE.toml with a list of settings for each option; options given beside it win.",
    ),
    click.Option(
        ["--trials"],
        type=click.IntRange(min=1),
        help="Try so many of the settings, as a search suggests (Optuna); those worse than the"
        " median at a validation are ended. Numbers of --grid may be ranges:"
        " lr = {low = 1e-4, high = 1e-2, log = true}.",
    ),
    click.Option(
        ["--jobs"],
        type=click.IntRange(min=1),
        help="Train so many at once, each in a process of its own; of several GPUs each has one."
        "  [default: one after the other, in this process]",
    ),
    click.Option(
        ["--prune"],
        type=click.Choice(("median", "asha", "none")),
        help="What ends a student at a validation. median: half of the trials were better at that"
        " step; asha: at its 1st, 3rd, 9th, ... validation it is not among the best third of those"
        " that came as far. Both are Optuna's: `pip install 'teachonce[tune]'`."
        "  [default: median with --trials, else none]",
    ),
    click.Option(
        ["--ray"],
        is_flag=False,
        flag_value=AUTO,
        metavar="[ADDRESS]",
        help="Train as many at once as the nodes of a Ray cluster have room for, on a disk that all"
        " nodes see: HOST:PORT, local (a cluster of this machine, for this sweep), or no word: the"
        " cluster of RAY_ADDRESS or of this machine, else local. Needs"
        " `pip install 'teachonce[ray]'`.",
    ),
    click.Option(
        ["--ray-gpus"],
        type=click.FloatRange(min=0),
        help="With --ray: GPUs of a student, 0.5: two share one.  [default: 1 where the cluster has"
        " any and --device is not cpu, else 0]",
    ),
    click.Option(
        ["--downstream"],
        type=FILE,
        help="FILE.toml with tables [tasks.NAME] of downstream's options: each student is scored"
        " on them, and so is each model of [models].",
    ),
    click.Option(
        ["--page"],
        type=FILE,
        help="Write index.html of a sweep's folder anew, also while it runs, and do nothing else.",
    ),
    click.Option(
        ["--json", "as_json"],
        is_flag=True,
        help="Print the students as JSON in place of the table, and all else to stderr.",
    ),
)
OF_SWEEP_NAMES = ("grid", "trials", "prune", "jobs", "ray", "ray_gpus", "downstream", "page")
REPEATED = "repeated or a comma list"
IN_SWEEP = "a comma list; repeated, it is another setting of the sweep, not one more loss"
"""What the help of --loss says of its words for one student, and says of them here."""


@command_errors
def sweep(page: Path | None, as_json: bool, **arguments: Any) -> None:
    """Train a student for every combination of the repeated options and compare them in one table,
    the best first.

    --loss is given once for each setting, as a comma list (--loss mlm=1 --loss mlm=1,hidden=3).
    --grid FILE.toml holds such lists, and with --trials N ranges that are searched. Students that
    are finished already are not trained again; one that fails does not stop the others.
    """
    say = partial(click.echo, err=as_json)
    if page:
        from teachonce.student_train.sweep.page.report import write_report

        say(f"page in {write_report(page)}")
        return
    words = {name: arguments.pop(name) for name in OF_SWEEP_NAMES if name != "page"}
    _check(words, arguments["store"])
    folder = arguments.pop("out")
    once = {"store"} | arguments.keys() & scoped(TrainOptions, ONCE)
    fixed = {name: arguments.pop(name) for name in once}
    grid = words.pop("grid")
    space = over(read_space(grid, list(arguments)) if grid else {}, arguments)
    if words["trials"] and not varied(space):
        raise UserError(
            "--trials: nothing varies; give ranges or lists in --grid FILE.toml, or an option twice"
        )
    from teachonce.student_train.sweep.job import Sweep

    Sweep(folder, fixed, space, f"{grid}: ", **words).run(say, as_json)


def _check(words: Mapping[str, Any], stores: Sequence[str]) -> None:
    """Raise UserError for options that contradict one another, or need what is not installed."""
    if not stores:
        raise UserError("--store: give the store that the students learn from")
    ray, gpus, prune = words["ray"], words["ray_gpus"], words["prune"]
    if ray is None and gpus is not None:
        raise UserError(f"--ray-gpus {gpus:g}: for students on Ray; add --ray")
    if ray is not None:
        check_address(ray)
        check_gpus(gpus or 0)
        if words["jobs"] is not None:
            raise UserError(
                f"--jobs {words['jobs']} and --ray contradict each other: Ray trains as many at"
                " once as its nodes have room for"
            )
    if prune == "median" and not words["trials"]:
        raise UserError("--prune median: a search's trials are held against it; add --trials N")
    if words["trials"] or prune == "asha":
        check_library("optuna", "tune", "--trials" if words["trials"] else "--prune asha")


def _command() -> click.Command:
    """Make the command of student-train's options. Each may be given several times, but for those
    that a sweep takes once."""
    varied = options_of(TrainOptions).keys() - scoped(TrainOptions, ONCE)
    found = {str(option.name): option for option in parameters(varied)}
    del found["allow_partial"]  # all students of a table learn from one text
    found["out"] = click_option(TrainOptions, "out", help=OUT_HELP)
    found["store"].required = False  # a page is made of the folder alone
    found["loss"].help = (found["loss"].help or "").replace(REPEATED, IN_SWEEP)
    return GroupedCommand(
        "student-sweep",
        groups={"The sweep": OF_SWEEP_NAMES, **GROUPS},
        params=[*found.values(), *OF_SWEEP],
        callback=sweep,
        help=sweep.__doc__,
        context_settings=CONTEXT,
    )


main = _command()


if __name__ == "__main__":
    main()
