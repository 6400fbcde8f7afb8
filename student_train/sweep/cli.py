"""`student-sweep`: many students from one store, one after the other, and one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teachonce.student_train.cli import GROUPS, parameters
from teachonce.student_train.output.ranking import SWEEP, ranked, told_best
from teachonce.student_train.settings.naming import beside
from teachonce.student_train.settings.option_fields import ONCE, START
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.execution import Execution
from teachonce.student_train.sweep.runs import Run, Runs
from teachonce.student_train.sweep.scores import Plan, Task, read_plan, score
from teachonce.student_train.sweep.space import (
    Point,
    arguments_of,
    corners,
    over,
    points,
    read_space,
    varied,
)
from teachonce.student_train.sweep.table import CSV, others, show, table
from teachonce.student_train.sweep.trials import Listed, Source, Study, Trials
from teachonce.support.console import CONTEXT, command_errors, counted
from teachonce.support.errors import UserError
from teachonce.support.extras import check_library, library
from teachonce.support.grouped_help import GroupedCommand
from teachonce.support.lease import Lease, Taken
from teachonce.support.options import click_option, options_of, scoped
from teachonce.support.ray_cluster import (
    AUTO,
    Home,
    check_address,
    check_gpus,
    cluster,
    gpus_of_worker,
    short,
)
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.output.run import Prepared

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
def sweep(
    out: Path | None,
    store: tuple[str, ...],
    as_json: bool,
    grid: Path | None,
    trials: int | None,
    jobs: int | None,
    prune: str | None,
    ray: str | None,
    ray_gpus: float | None,
    downstream: Path | None,
    page: Path | None,
    **arguments: Any,
) -> None:
    """Train a student for every combination of the repeated options and compare them in one table,
    the best first.

    --loss is given once for each setting, as a comma list (--loss mlm=1 --loss mlm=1,hidden=3).
    --grid FILE.toml holds such lists, and with --trials N ranges that are searched. Students that
    are finished already are not trained again; one that fails does not stop the others.
    """
    say = partial(click.echo, err=as_json)
    if page:
        say(f"page in {_page(page)}")
        return
    if not store:
        raise UserError("--store: give the store that the students learn from")
    where = Where(jobs, ray, ray_gpus)
    where.check()
    if prune == "median" and not trials:
        raise UserError("--prune median: a search's trials are held against it; add --trials N")
    if trials or prune == "asha":
        check_library("optuna", "tune", "--trials" if trials else "--prune asha")
    folder = out or beside(store[0], "sweep")
    command = arguments.keys() & scoped(TrainOptions, ONCE)
    once = {"store": store, **{name: arguments.pop(name) for name in command}}
    space = over(read_space(grid, list(arguments)) if grid else {}, arguments)
    if trials and not varied(space):
        raise UserError(
            "--trials: nothing varies; give ranges or lists in --grid FILE.toml, or an option twice"
        )
    tried = corners(space) if trials else points(space, f"{grid}: ")
    planned = [(point, _options(once, point)) for point in tried]
    plan = read_plan(downstream) if downstream else Plan()
    runs = Runs(folder, space, varied(space), trials is not None)
    for _, options in planned:
        _check_early(options)

    def make(point: Point, options: TrainOptions | None = None) -> Run:
        given = arguments_of(point)
        settings = {name: str(given[name]) for name in runs.varied}
        made = where.placed(folder, options or _options(once, point))
        return runs.add(Run(len(runs.runs) + 1, settings, made))

    with closing(_only(folder)) as lease:
        if trials:
            seed = planned[0][1].seed
            source: Source = Trials(space, trials, seed, runs, make, prune or "median")
        else:
            for point, options in planned:
                make(point, options)
            halves = prune == "asha"
            source = Listed(runs, Study("asha", runs.varied, "--prune asha") if halves else None)
        checked = [_in_folder(folder, where.resolved(options)) for _, options in planned]
        _execute(source, runs, checked, plan.tasks, say, where, lease, planned[0][1].device)
        problems = _references(plan, runs, say)
        _tell(runs, as_json, say, problems)


@dataclass(frozen=True)
class Where:
    """Where students are trained: here, in `jobs` processes, or on the cluster `ray`."""

    jobs: int | None
    ray: str | None
    ray_gpus: float | None

    def check(self) -> None:
        """Raise UserError for words that contradict each other."""
        if self.ray is None:
            if self.ray_gpus is not None:
                raise UserError(f"--ray-gpus {self.ray_gpus:g}: for students on Ray; add --ray")
            return
        check_address(self.ray)
        check_gpus(self.ray_gpus or 0)
        if self.jobs is not None:
            raise UserError(
                f"--jobs {self.jobs} and --ray contradict each other: Ray trains as many at once as"
                " its nodes have room for"
            )

    def resolved(self, options: TrainOptions) -> TrainOptions:
        """Decide what depends on the machine, for what is checked here: nodes of a cluster may have
        a GPU that this one lacks. Raises UserError for a GPU by its number, as Ray gives it."""
        if self.ray is None:
            return options.resolved()
        if options.device.startswith("cuda:"):
            raise UserError(
                f"--device {options.device}: Ray chooses the GPU of each student; say --device cuda"
            )
        return replace(options, device="cpu").resolved()

    def placed(self, folder: Path, options: TrainOptions) -> TrainOptions:
        """Name the folder of a student; device and precision a node of a cluster decides itself."""
        made = _in_folder(folder, self.resolved(options))
        if self.ray is None:
            return made
        return replace(made, device=options.device, precision=options.precision)


def _only(folder: Path) -> Lease:
    """Take the right to write a sweep. Raises UserError where another process has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        return Lease(folder)
    except Taken as error:
        raise UserError(
            f"{folder}: another `student-sweep` fills it already: {error}; or give another --out"
        ) from None


def _page(folder: Path) -> Path:
    from teachonce.student_train.sweep.page.report import write_report

    return write_report(folder)


def _options(once: Mapping[str, Any], point: Point) -> TrainOptions:
    from teachonce.student_train.arguments import checked_from

    return checked_from({**once, **arguments_of(point)})


def _check_early(options: TrainOptions) -> None:
    from teachonce.student_train.arguments import check_early

    check_early(options)


def _execute(
    source: Source,
    runs: Runs,
    planned: list[TrainOptions],
    tasks: tuple[Task, ...],
    say: Callable[[str], object],
    where: Where,
    lease: Lease,
    device: str,
) -> None:
    """Check what is planned, then do all runs; `device` is the one that was asked for."""
    from teachonce.student_train.output.run import open_stores

    def kept() -> str:
        return f"{runs.folder}: all students are saved; the same command goes on"

    total = "" if isinstance(source, Trials) else f"/{len(planned)}"

    def heading(run: Run) -> str:
        return f"[{run.number}{total}] {run.told}"

    execution = Execution(source, runs, tasks, heading, say)
    with open_stores(planned[0]) as stores:
        starts = _check(planned, stores)
        if where.ray is None and where.jobs is None:
            execution.here(stores, starts)
    starts.clear()
    if where.ray is not None:
        _on_ray(execution, where, Home.here(runs.folder, lease), kept, device)
    elif where.jobs is not None:
        import torch

        from teachonce.student_train.sweep.processes import Processes, shared_cores

        gpus = torch.cuda.device_count() if planned[0].device == "cuda" else 0
        with stoppable(kept), shared_cores(where.jobs):
            execution.at_once(Processes(where.jobs, gpus))


def _on_ray(
    execution: Execution, where: Where, home: Home, kept: Callable[[], str], device: str
) -> None:
    ray = library("ray", "ray", "--ray")
    from teachonce.student_train.sweep.on_ray import Cluster

    assert where.ray is not None
    with stoppable(kept) as stop, cluster(ray, where.ray, stop):
        gpus = gpus_of_worker(ray, where.ray_gpus, device)
        try:
            execution.at_once(Cluster(ray, where.ray, gpus, home, stop, execution.say))
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {where.ray}: the cluster does not answer any more ({short(error)}); the"
                " same command goes on where it was"
            ) from None


def _references(plan: Plan, runs: Runs, say: Callable[[str], object]) -> list[str]:
    """Score the models that students are held against; return what went wrong."""
    problems = []
    for name, model in plan.models.items():
        found = runs.references[name] = dict[str, Any]()
        for task in plan.tasks:
            try:
                found[task.name] = score(task, model, name, runs.folder, say)
            except UserError as error:
                problems.append(f"{name}: {error}")
                say(problems[-1])
    runs.write()
    return problems


def _tell(runs: Runs, as_json: bool, say: Callable[[str], object], problems: list[str]) -> None:
    """Print the table, and which is best. Raises UserError where runs have failed."""
    rows = ranked(runs.finished())
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif rows:
        show(table(rows, runs.varied))
        if held_against := others(runs.references):
            click.echo()
            show(held_against)
    if rows:
        say(told_best(rows))
    if ended := sum(run.state == "pruned" for run in runs.runs):
        say(f"pruned    {counted(ended, 'trial')} of {len(runs.runs)}")
    say(f"students, {SWEEP} and {CSV} in {runs.folder}")
    with suppress(UserError):  # a page needs an extra
        say(f"page      {_page(runs.folder)}")
    if failed := runs.failed():
        raise UserError(
            f"{_counts(failed, len(runs.runs))}, the first of them {failed[0].folder.name}:"
            f" {failed[0].problem}; the same command tries them again"
        )
    if problems:
        raise UserError(f"{problems[0]}; the same command tries it again")


def _counts(failed: list[Run], runs: int) -> str:
    """Tell how many runs failed, and apart from them how many students have no scores."""
    trained = sum(run.state == "finished" for run in failed)
    untrained, of = len(failed) - trained, f"of {counted(runs, 'student')}"
    told = [f"{untrained} {of} failed"] if untrained else []
    if trained:
        verb = "is" if trained == 1 else "are"
        told.append(f"{trained} {'' if told else f'{of} '}{verb} trained but not scored")
    return " and ".join(told)


def _in_folder(folder: Path, options: TrainOptions) -> TrainOptions:
    return replace(options, out=folder / options.name())


def _check(planned: list[TrainOptions], stores: list[FeatureStore]) -> dict[Path, Prepared]:
    """Refuse, before the first student is trained, whatever any of them could be refused for.

    A student of each distinct start is prepared for it; gives these, by their folders.
    """
    from teachonce.student_train.output.report import learnt_from, read_report
    from teachonce.student_train.output.run import prepare
    from teachonce.student_train.train.checks import check

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
