"""A sweep: plans the students, checks all of them, trains and scores them, and prints one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teachonce.student_train.arguments import checked_from, stores_of
from teachonce.student_train.output.ranking import (
    SWEEP,
    comparable,
    describe_best,
    over_seeds,
    ranked,
)
from teachonce.student_train.output.report import check_same_settings, read_report, store_contents
from teachonce.student_train.plan.checks import check_memory, checked_plan
from teachonce.student_train.plan.train_plan import Stores
from teachonce.student_train.settings.naming import MAIN, path_next_to
from teachonce.student_train.settings.option_fields import START, loss_words
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.execution import Execution, Say
from teachonce.student_train.sweep.page.report import write_report
from teachonce.student_train.sweep.processes import Processes, shared_cores
from teachonce.student_train.sweep.runs import Run, SweepRuns
from teachonce.student_train.sweep.scores import ScoringPlan, check_scored, read_plan, score
from teachonce.student_train.sweep.space import Point, Space, arguments_of, corners, points, varied
from teachonce.student_train.sweep.table import CSV, show, table, table_of_references
from teachonce.student_train.sweep.trials import ListedRuns, RunSource, Study, Trials
from teachonce.support.console import counted
from teachonce.support.differences import describe_changes
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease, Taken
from teachonce.support.options import scoped
from teachonce.support.packages import library
from teachonce.support.ray_cluster import DriverNode, cluster, gpus_of_worker, short
from teachonce.support.redaction import redacted
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.prepared_student import Prepared


@dataclass(frozen=True)
class Sweep:
    """Describes a sweep with the options of its command line.

    out: folder of the students; None for a folder next to the store.
    fixed: the options that are equal for all students, by name.
    space: the settings that vary. where: the prefix of error messages about `space`.
    """

    out: Path | None
    fixed: Mapping[str, Any]
    space: Space
    where: str
    trials: int | None
    prune: str | None
    jobs: int | None
    ray: str | None
    ray_gpus: float | None
    downstream: Path | None

    @property
    def folder(self) -> Path:
        return self.out or path_next_to(self.fixed["store"][0], "sweep")

    def run(self, say: Say, as_json: bool) -> None:
        """Train and score all students, and print their table.

        Raises UserError for invalid options before the first training, and at the end if students
        have failed.
        """
        tried = corners(self.space) if self.trials else points(self.space, self.where)
        # Opened once for all students: reading the manifest of a large store takes time.
        with closing(stores_of(self.fixed)) as stores:
            planned = [(point, self._options(point, stores)) for point in tried]
            # Opening a remote store takes requests; it is checked when the training starts.
            if not any("://" in path for path in self.fixed["store"]):
                for _, options in planned:
                    checked_plan(options, *stores.opened)
        plan = read_plan(self.downstream) if self.downstream else ScoringPlan()
        changed = varied(self.space)
        # Their defaults depend on the student, so they may differ although they are not varied.
        first, *rest = [_losses_and_rate(options) for _, options in planned]
        differ = [name for name in first if any(each[name] != first[name] for each in rest)]
        changed = [*dict.fromkeys([*changed, *differ])]
        if self.trials and not comparable(changed):
            raise UserError(
                f"--trials: students that differ in {', '.join(changed)} are validated on different"
                " texts or masks, so their figures cannot be compared; list the settings without"
                " --trials, and score the students on a task (--downstream)"
            )
        with closing(_sweep_lease(self.folder)) as lease:
            # Under the lease: another sweep may have written its last students just now.
            runs = SweepRuns(self.folder, self.space, changed, self.trials is not None)
            # Earlier scores stay: the first run rewrites runs.json before models are scored again.
            runs.references = {**dict.fromkeys(plan.models, {}), **runs.references}
            total = "" if self.trials else f"/{len(planned)}"
            execution = Execution(self._source(runs, planned), runs, plan.tasks, total, say)
            self._execute(execution, [options for _, options in planned], lease)
            problems = _references(plan, runs, say)
            _show(runs, as_json, say, problems)

    def _source(self, runs: SweepRuns, planned: list[tuple[Point, TrainOptions]]) -> RunSource:
        """Return the search, or the list of the planned students. Raises UserError as `Trials` and
        `SweepRuns.check_retained` do."""
        if self.trials:
            make, seed = partial(self._add_run, runs), planned[0][1].seed
            return Trials(self.space, self.trials, seed, runs, make, self.prune or "median")
        for point, options in planned:
            self._add_run(runs, point, options)
        runs.check_retained()
        halves = self.prune == "asha"
        return ListedRuns(runs, Study("asha", runs.varied, "--prune asha") if halves else None)

    def _add_run(self, runs: SweepRuns, point: Point, options: TrainOptions | None = None) -> Run:
        """Add the run of a point to the sweep, and return it. `options` are the options of the
        point, if they were already made."""
        options = options or self._options(point)
        arguments = {**_losses_and_rate(options), **arguments_of(point)}
        settings = {name: str(arguments[name]) for name in runs.varied}
        resolved = self._resolved(options)
        if self.ray is not None:  # each node resolves its own
            resolved = replace(resolved, device=options.device, precision=options.precision)
        return runs.add(Run(len(runs.runs) + 1, settings, resolved))

    def _options(self, point: Point, stores: Stores | None = None) -> TrainOptions:
        return checked_from({**self.fixed, **arguments_of(point)}, stores)

    def _resolved(self, options: TrainOptions) -> TrainOptions:
        """Set the folder, and resolve the options for the checks on this machine. If the student
        already has a folder, in either precision, it retains that precision.

        Raises UserError for a GPU by number with Ray, which assigns GPUs itself.
        """
        # With Ray the checks run on the CPU: this machine may lack the GPU that its nodes have.
        if self.ray is not None:
            if options.device.startswith("cuda:"):
                raise UserError(
                    f"--device {options.device}: Ray assigns a GPU to each student; give --device"
                    " cuda"
                )
            options = replace(options, device="cpu")
        students = [options.resolved()]
        if options.precision == "auto" and "precision" not in varied(self.space):
            # On the machine that started the sweep, auto may have been another precision.
            students += [replace(students[0], precision=name) for name in ("bf16", "fp32")]
        shown = varied(self.space) or MAIN
        placed = [replace(each, out=each.folder_in(self.folder, shown)) for each in students]
        return next((each for each in placed if each.out_folder().exists()), placed[0])

    def _execute(self, execution: Execution, planned: list[TrainOptions], lease: Lease) -> None:
        """Check all planned students, then do all runs."""
        from teachonce.student_train.output.run import open_stores  # torch loads only for work

        checked = [self._resolved(options) for options in planned]

        def saved() -> str:
            return f"{self.folder}: all students are saved; continue with the same command"

        with open_stores(checked[0]) as stores:
            starts = _check(checked, stores)
            if self.ray is None and self.jobs is None:
                execution.here(stores, starts)
        # Otherwise the prepared students stay in this process's memory while the workers train.
        starts.clear()
        if self.ray is not None:
            self._on_ray(execution, planned[0].device, DriverNode.here(self.folder, lease), saved)
        elif self.jobs is not None:
            import torch

            # With cuda:N all students share that GPU.
            gpus = torch.cuda.device_count() if checked[0].device == "cuda" else 0
            with stoppable(saved), shared_cores(self.jobs):
                execution.at_once(Processes(self.jobs, gpus))

    def _on_ray(
        self, execution: Execution, device: str, home: DriverNode, saved: Callable[[], str]
    ) -> None:
        ray = library("ray", "ray", "--ray")
        from teachonce.student_train.sweep.on_ray import RayWorkers

        assert self.ray is not None
        with stoppable(saved) as stop, cluster(ray, self.ray, stop):
            gpus = gpus_of_worker(ray, self.ray_gpus, device)
            try:
                execution.at_once(RayWorkers(ray, self.ray, gpus, home, stop, execution.say))
            except ray.exceptions.RayError as error:
                raise UserError(
                    f"--ray {self.ray}: the cluster no longer responds ({short(error)}); run the"
                    " same command to continue"
                ) from None


def _losses_and_rate(options: TrainOptions) -> dict[str, str]:
    """Return the losses and the learning rate of a student, of each stage if they differ."""
    stages = [options.in_stage(stage) for stage in options.stages or ({},)]
    words = {
        "loss": [loss_words(stage.loss) for stage in stages],
        "lr": [f"{stage.resolved_lr:g}" for stage in stages],
    }
    return {
        name: each[0] if len(set(each)) == 1 else ", then ".join(each)
        for name, each in words.items()
    }


def _sweep_lease(folder: Path) -> Lease:
    """Take the lease of a sweep's folder. Raises UserError if another process has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        return Lease(folder)
    except Taken as error:
        raise UserError(
            f"{folder}: another `student-sweep` is writing to this folder; give another --out, or"
            f" wait: {error}"
        ) from None


def _check(planned: list[TrainOptions], stores: list[FeatureStore]) -> dict[Path, Prepared]:
    """Check every planned student before the first training.

    One student of each distinct start is prepared. Returns the prepared students by folder.
    """
    from teachonce.student_train.prepared_student import prepare

    starts, planned_there = dict[tuple[Any, ...], TrainOptions](), dict[Path, dict[str, Any]]()
    contents = [store.manifest.content() for store in stores]
    for options in planned:
        check_memory(checked_plan(options, *stores))
        out, settings = options.out_folder(), options.describing()
        if changed := describe_changes(planned_there.setdefault(out, settings), settings):
            raise UserError(
                f"{out}: two students of this sweep would be written to it ({changed}), because its"
                " name has only the last component of a path; rename the folders or stores"
            )
        before = read_report(out)
        if before and store_contents(before) != contents:
            raise UserError(f"{out} was trained on another store; give another --out")
        if before and "result" in before:
            check_same_settings(out, before, redacted(settings), of_sweep=True)
        else:
            start = sorted(scoped(TrainOptions, START))
            starts[tuple(getattr(options, name) for name in start)] = options
    return {options.out_folder(): prepare(options, *stores) for options in starts.values()}


def _references(plan: ScoringPlan, runs: SweepRuns, say: Callable[[str], object]) -> list[str]:
    """Score the reference models. Returns a line for each failure."""
    problems = []
    for name, model in plan.models.items():
        scores = runs.references[name] = dict[str, Any]()
        for task in plan.tasks:
            try:
                check_scored(task, model, name, runs.folder)
                scores[task.name] = score(task, model, name, runs.folder, say)
            except UserError as error:
                problems.append(f"{name}: {error}")
                say(problems[-1])
    runs.write()
    return problems


def _show(
    runs: SweepRuns, as_json: bool, say: Callable[[str], object], problems: list[str]
) -> None:
    """Print the table and the best student. Raises UserError if runs have failed."""
    rows = ranked(runs.finished())
    means = over_seeds(rows, runs.varied)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif rows:
        show(table(rows, runs.varied))
        if means:
            click.echo("\nmeans over seeds:")
            show(table(means, [*(name for name in runs.varied if name != "seed"), "seeds"]))
        if lines := table_of_references(runs.references):
            click.echo()
            show(lines)
    if rows:
        say(describe_best(rows, means))
    if ended := sum(run.state == "pruned" for run in runs.runs):
        say(f"pruned    {counted(ended, 'trial')} of {len(runs.runs)}")
    say(f"students, {SWEEP} and {CSV} in {runs.folder}")
    try:
        page = str(write_report(runs.folder))
    except UserError as error:  # a page needs an extra
        page = f"not written: {error}"
    say(f"page      {page}")
    if failed := runs.failed():
        raise UserError(
            f"{_counts(failed, len(runs.runs))}, the first of them {failed[0].folder.name}:"
            f" {failed[0].problem}; the same command tries them again"
        )
    if problems:
        raise UserError(f"{problems[0]}; the same command tries it again")


def _counts(failed: list[Run], runs: int) -> str:
    """Return how many runs failed, and how many other students have no scores."""
    trained = sum(run.state == "finished" for run in failed)
    untrained, of = len(failed) - trained, f"of {counted(runs, 'student')}"
    parts = [f"{untrained} {of} failed"] if untrained else []
    if trained:
        verb = "is" if trained == 1 else "are"
        parts.append(f"{trained} {'' if parts else f'{of} '}{verb} trained but not scored")
    return " and ".join(parts)
