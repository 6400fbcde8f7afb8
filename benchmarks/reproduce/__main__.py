"""The claims of five papers, held against students that their recipes train.

    python -m benchmarks.reproduce SOURCE|all --work DIR [--size small|title] [--seeds N] [--jobs N]
    python -m benchmarks.reproduce SOURCE --size full --teacher DIR --data DIR --work DIR
                                   [--dry-run] [--table NAME]... [--arm NAME]... [--scale X]
                                   [--larger-teacher DIR]

The small size takes one to three hours of two cores for each source. The size `title` trains the
few arms of the paper's main claims longer, about two hours of one core with five seeds. The full
size is the published setting, on the user's own teacher and data (README.md in this folder lists
the files). Every step is a command as a user types it; --jobs students at a time are trained and
scored, and share the cores. What is finished in --work is not made again; no arm is chosen by the
test set, it only scores. A section that is written again loses what was written below it by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from benchmarks.common.results import publish, results_option
from benchmarks.reproduce.papers import BEST, NAMES, sources
from benchmarks.reproduce.reproduction import Reproduction
from benchmarks.reproduce.source import FULL, SIZES, TITLE, Claim, Scores, Source, Work, selected
from benchmarks.reproduce.steps import Steps, plan_text
from benchmarks.reproduce.verdicts import compare_best, report
from teachonce.support.console import command_errors
from teachonce.support.errors import UserError


@click.command()
@click.argument("name", metavar="SOURCE", type=click.Choice((*NAMES, "best", "all")))
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--size", type=click.Choice(SIZES), default="small")
@click.option("--teacher", help="The teacher of the full size: a folder, or a name of the hub.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the full size's data.")
@click.option(
    "--larger-teacher", "larger", default="", help="A second teacher, for tables that compare two."
)
@click.option("--table", "tables", multiple=True, help="Only these tables of the source.")
@click.option("--arm", "only", multiple=True, help="Only these arms, and the claims about them.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=1.0,
    help="What lengths, batches and vocabularies of the full size are multiplied by.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Students at a time.")
@click.option("--dry-run", "dry", is_flag=True, help="Print every command, with hours and bytes.")
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=40.0,
    help="TFLOP/s that the machine sustains, for the hours of --dry-run.",
)
@results_option
@command_errors
def main(
    name: str,
    work: Path,
    seeds: int,
    size: str,
    teacher: str | None,
    data: Path | None,
    larger: str,
    tables: tuple[str, ...],
    only: tuple[str, ...],
    scale: float,
    jobs: int,
    dry: bool,
    tflops: float,
    results: Path,
) -> None:
    """Train and score the arms of a SOURCE; best: compare our recipe with the best of each; all:
    both."""
    if size == FULL and (not teacher or not data):
        raise UserError("--size full: give your own --teacher and --data")
    if size == TITLE and name == "best":
        raise UserError("best: --size title has no recipe of ours; give --size small")
    names = NAMES if name in ("all", "best") else (name,)
    steps, runs = Steps(jobs, dry), {}
    by_folder = {
        folder: source
        for paper in names
        for folder, source in sources(paper, size, data or Path(), bool(larger)).items()
    }
    for folder, source in _selected(by_folder, tables).items():
        inputs = Work(work / folder, steps, teacher or "", larger, data or Path(), scale)
        runs[folder] = Reproduction(selected(source, only), inputs, seeds)
    flags = ["--seeds", str(seeds), "--size", size]
    flags += [word for table in tables for word in ("--table", table)]
    flags += [word for arm in only for word in ("--arm", arm)]
    flags += ["--scale", f"{scale:g}"] if scale < 1 else []
    for run in runs.values() if name != "best" else ():
        scores = run.scores()
        if not dry:
            settings = f"`python -m benchmarks.reproduce {shlex.join([name, *flags])}`."
            body = report(run.source, scores, run.chances(), _prober(run))
            if run.source.remark:
                body += f"\n\n{run.source.remark(run.work)}"
            took = f"The reproduction took {run.minutes():.0f} minutes with --jobs {jobs}."
            publish(run.source.title, f"{settings} {run.source.about} {took}", body, results)
    if name in ("all", "best") and size != TITLE and not dry:
        settings = f"`python -m benchmarks.reproduce {shlex.join(['best', *flags])}`. {BEST}"
        publish("Our recipe against those of the sources", settings, compare_best(runs), results)
    if dry:
        click.echo(plan_text(steps.planned, tflops))


def _selected(tables: Mapping[str, Source], names: tuple[str, ...]) -> dict[str, Source]:
    """Return the tables of these names; all without names."""
    if unknown := sorted(set(names) - tables.keys()):
        raise UserError(f"--table {unknown[0]}: there are {', '.join(tables)}")
    return {name: source for name, source in tables.items() if name in names or not names}


def _prober(run: Reproduction) -> Callable[[Claim], Scores]:
    def probed(claim: Claim) -> Scores:
        assert claim.probe is not None
        return run.probed((claim.better, claim.worse), claim.probe)

    return probed


if __name__ == "__main__":
    main()
