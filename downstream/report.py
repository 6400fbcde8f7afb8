"""Finished runs as tables for a person, and several of them as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from store.console import counted, readable, wide_console
from store.errors import UserError

FILE = "scores.json"
TEST = "test"  # also the mean over files, where there are several
Told = Callable[[float], str]


def splits_to_test(paths: Sequence[Path]) -> dict[str, Path]:
    """The split of the file; of several files one each, named "test FILE".

    Raises UserError where a file is given twice.
    """
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"--test {path}: is given twice; give each file once")
    return {TEST if len(paths) == 1 else f"{TEST} {path}": path for path in paths}


def show(table: Table) -> None:
    """Print it; into a file or pipe as wide as it is."""
    wide_console().print(table)


def save(result: dict[str, Any], out: Path) -> None:
    """Write `scores.json` into a new folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def seed_table(result: dict[str, Any]) -> Table:
    """A row for each split: mean ± deviation over the seeds, in percent."""
    as_is = result["settings"].get("as_is")
    how = "as it is" if as_is else counted(len(result["seeds"]), "seed")
    title = f"{result['task']}: {result['model']}, {how}"
    table = _table(title, ("split", "examples", *result["measures"]))
    for split in result["mean"]:
        table.add_row(split, f"{result['examples'][split]:,}", *_cells(result, split))
    return table


def _cells(result: dict[str, Any], split: str) -> list[str]:
    mean, deviation = result["mean"][split], result["deviation"][split]
    return [
        f"{100 * mean[name]:.2f} ± {100 * deviation[name]:.2f}"
        for name in result["measures"].values()
    ]


def joined(runs: Sequence[Path]) -> dict[str, Any]:
    """Finished fine-tunings, given as folders or their scores.json, in one.

    Returns `{"task": "table", "rows": [...]}`. A row is a task, a model and a file: scores on test,
    where there is none on dev; `split` says which. Several files of test have a row each and one of
    their mean.

    Raises UserError where a run is not finished or no fine-tuning.
    """
    rows = []
    for result in map(_read, runs):
        tests = [name for name in result["mean"] if name.startswith(TEST)]
        for split in tests or ["dev"]:
            file = result["files"].get(split)
            rows.append(
                {
                    "task": result["task"],
                    "data": _told(file, tests) if file else f"mean of {len(tests) - 1} files",
                    "model": result["model"],
                    "split": split,
                    "seeds": len(result["seeds"]),
                    "measures": result["measures"],
                    "mean": {split: result["mean"][split]},
                    "deviation": {split: result["deviation"][split]},
                }
            )
    return {"task": "table", "rows": sorted(rows, key=lambda row: (row["task"], row["data"]))}


def _told(file: str, tests: Sequence[str]) -> str:
    """Its name; among several files, which may have one name in folders of their own, its path."""
    return file if len(tests) > 1 else Path(file).name


def _read(run: Path) -> dict[str, Any]:
    path = run / FILE if run.is_dir() else run
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if {"mean", "deviation", "files", "measures"} <= set(result):
            return dict(result)
        problem = "is a table of speed" if "devices" in result else "is no fine-tuning"
    except OSError:
        problem = f"no finished run, it has no {FILE}"
    except (ValueError, TypeError) as error:
        problem = f"not written by downstream ({error})"
    raise UserError(
        f"run {run}: {problem}; give --out folders of --task pos, ner, classify, pair or qa"
    )


def joined_table(result: dict[str, Any]) -> Table:
    """A row for each run and a column for each measure that any of them has, in percent."""
    headings = list(dict.fromkeys(name for row in result["rows"] for name in row["measures"]))
    table = _table("", ("task", "data", "model", "seeds", *headings))
    for row in result["rows"]:
        figures = dict(zip(row["measures"], _cells(row, row["split"]), strict=True))
        data = f"{row['data']} (dev)" if row["split"] == "dev" else row["data"]
        cells = [figures.get(name, "") for name in headings]
        table.add_row(row["task"], data, row["model"], str(row["seeds"]), *cells)
    return table


def speed_table(result: dict[str, Any]) -> Table:
    """A row for each model; in brackets how many times less it is than the teacher's."""
    settings, length = result["settings"], result["length"]
    batch = f"{settings['batch_size']} x {length}"
    title = f"median of {counted(settings['runs'], 'run')} on {result['hardware']}"
    headings = ["model", "parameters", "disk"]
    for device in result["devices"]:
        headings += [f"{device} {batch}, ms", f"{device} memory", f"{device} sentence, ms"]
    table = _table(title, headings)
    for row in result["models"]:
        cells = [
            _figure(row, _millions, None, "parameters"),
            _figure(row, readable, None, "disk_bytes"),
        ]
        for device in result["devices"]:
            cells += [
                _figure(row, _milliseconds, device, "batch_ms"),
                _figure(row, readable, device, "memory_bytes"),
                _figure(row, _milliseconds, device, "sentence_ms"),
            ]
        table.add_row(row["model"], *cells)
    return table


def _millions(number: float) -> str:
    return f"{number / 1e6:.2f} M"


def _milliseconds(number: float) -> str:
    return f"{number:,.2f}"


def _figure(row: dict[str, Any], told: Told, device: str | None, name: str) -> str:
    figures, ratios = row, row.get("ratio", {})
    if device:
        figures, ratios = figures[device], ratios.get(device, {})
    if figures[name] is None:
        return "not known"
    return told(figures[name]) + (f" (1/{ratios[name]:.1f})" if name in ratios else "")


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    return table
