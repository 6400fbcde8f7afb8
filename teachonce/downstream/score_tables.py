"""Writes the scores.json of a run, combines several of them, and prints tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from teachonce.checkpoints.names import resolve_vectors
from teachonce.downstream.options import TEST
from teachonce.student_train.output.ranking import SCORED, SWEEP, ranked
from teachonce.support import files
from teachonce.support.console import counted, readable, wide_console
from teachonce.support.errors import UserError

FILE = "scores.json"
SHARES = 100
"""The `scale` that prints shares in percent."""
ABOUT = ("task", "data", "model", "run", "seeds")
NATS = "nats/character"
OF_A_SWEEP = {
    NATS: "valid_mlm_per_character",
    "accuracy": "valid_accuracy",
    "agreement": "valid_agreement",
    "Spearman with the teacher": "valid_spearman",
}
"""Keys of the validation figures of a sweep that compare its students, by heading."""
OF_SCORES = {"task", "model", "seeds", "mean", "deviation", "files", "measures", "scale"}
OF_SPEED = {"models", "settings", "length", "hardware", "devices"}
"""Keys of every scores.json of a task, and of speed."""


def show(table: Table) -> None:
    """Print a table; in a file or pipe at its full width."""
    wide_console().print(table)


def save(result: dict[str, Any], out: Path) -> None:
    """Write `scores.json` into a new folder."""
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / FILE, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())


def result_of(
    about: Mapping[str, Any],
    model: str,
    files: Mapping[str, Any],
    settings: Mapping[str, Any],
    examples: Mapping[str, int],
    runs: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Make the content of scores.json from the runs of a task.

    about: the task's name, measures, primary and scale.
    files, settings: paths in them are converted to text.

    `deviation` is the sample standard deviation over the runs, 0 for a single run. With several
    test files, the mean over them is added to `examples` and to each run, and `file_deviation` is
    the sample standard deviation over the means of the files.
    """
    tests, counts = [name for name in files if name.startswith(TEST)], dict(examples)
    if len(tests) > 1:
        counts[TEST] = sum(counts[name] for name in tests)
        runs = [{**run, TEST: _over_all([run[name] for name in tests], fmean)} for run in runs]
    return {
        **about,
        "model": model,
        **json.loads(json.dumps({"files": {**files}, "settings": {**settings}}, default=str)),
        "examples": counts,
        **_averaged(runs, [split for split in counts if split != "train"]),
    }


def of_models(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the content of scores.json for models scored without training; each model is one run."""
    if len(results) == 1:
        return results[0]
    models = [result["model"] for result in results]
    # The examples of mlm are blocks, whose number depends on the model's tokenizer.
    runs = [
        {"model": model, "examples": result["examples"], **result["seeds"][0]}
        for model, result in zip(models, results, strict=True)
    ]
    averaged = _averaged(runs, list(results[0]["mean"]))
    return {**results[0], "model": ", ".join(models), "saved": models, **averaged}


def _averaged(runs: Sequence[dict[str, Any]], splits: Sequence[str]) -> dict[str, Any]:
    scores = {split: [run[split] for run in runs] for split in splits}
    mean = {split: _over_all(rows, fmean) for split, rows in scores.items()}
    deviation = {split: _over_all(rows, _deviation) for split, rows in scores.items()}
    files = [mean[split] for split in splits if split.startswith(TEST) and split != TEST]
    over_files = {"file_deviation": _over_all(files, _deviation)} if files else {}
    return {"seeds": list(runs), "mean": mean, "deviation": deviation, **over_files}


def _over_all(
    scores: Sequence[dict[str, float]], reduce: Callable[[list[float]], float]
) -> dict[str, float]:
    return {name: reduce([score[name] for score in scores]) for name in scores[0]}


def _deviation(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def seed_table(result: dict[str, Any]) -> Table:
    """Make a table with a row for each split: mean ± standard deviation over the seeds, shares in
    percent.

    A single seed has no standard deviation. If several models were scored without training, each
    has its own rows; rows with the mean over the models follow only if all have one architecture
    and size (`_alike`).
    """
    as_is, models = result["settings"].get("as_is"), _each_model(result)
    runs = len(result["seeds"])
    title = f"{result['model']}, {'as is' if as_is else counted(runs, 'seed')}"
    if models:
        title = f"{runs} models as they are"
    if result.get("setup"):
        title = f"{title}, {result['setup']}"
    table = _table(f"{result['task']}: {title}", ("split", "examples", *result["measures"]))
    means = _means(result)
    for entry in (*models, *means):
        for split, mean in entry["mean"].items():
            several = len(entry["seeds"]) > 1
            cells = _cells(entry, mean, entry["deviation"][split] if several else None)
            which = f"{entry['model']}: {split}" if models else split
            table.add_row(which, f"{entry['examples'][split]:,}", *cells)
    if means and (spread := result.get("file_deviation")):
        scale, decimals = result["scale"], result.get("decimals", 2)
        spreads = (f"± {scale * spread[name]:.{decimals}f}" for name in result["measures"].values())
        table.add_row("between files", "", *spreads)
    return table


def _alike(models: Sequence[str]) -> bool:
    """Return whether models have the same architecture and sizes, as students of one setting and
    several seeds do. Returns False if a model has no config.json."""
    sizes = []
    for model in models:
        file = resolve_vectors(model).folder() / "config.json"
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        # Paths, versions and the names of labels may differ between seeds.
        sizes.append({k: v for k, v in config.items() if not isinstance(v, str | float | dict)})
    return bool(sizes[0]) and all(size == sizes[0] for size in sizes)


def _cells(
    result: dict[str, Any], scores: dict[str, float], deviation: dict[str, float] | None = None
) -> list[str]:
    """Return a cell for each measure of a split, with the standard deviation if `deviation` is
    given."""
    scale, decimals = result["scale"], result.get("decimals", 2)
    return [
        f"{scale * scores[name]:.{decimals}f}"
        + (f" ± {scale * deviation[name]:.{decimals}f}" if deviation else "")
        for name in result["measures"].values()
    ]


def combine_runs(runs: Sequence[Path]) -> dict[str, Any]:
    """Combine finished runs of any tasks, given as folders or as their scores.json.

    A folder of student-sweep can be a run, too. It has a row for each student with its validation
    figures, the best first. Then follow the rows of the sweep's downstream runs, for its students
    and for the models of its [models].

    Returns `{"task": "table", "rows": [...]}`. A row is a task, a model, a file and a run (the name
    of its --out folder, or its path if names repeat), with the scores on test or, without a test,
    on dev; `split` is the name of the split. With several test files there is a row for each file,
    and one for the mean over the files. `speed` has the model's figures from a run of speed; if
    several runs measured the model, there is a row for each run. Models with a speed and no score
    come last.

    Raises UserError for a run that is not finished.
    """
    scored, results = list[dict[str, Any]](), list[tuple[str, dict[str, Any]]]()
    folders = [run.resolve() if run.is_dir() else run.resolve().parent for run in runs]
    unique = len({folder.name for folder in folders}) == len({*folders})
    for run, folder in zip(runs, folders, strict=True):
        of_run, name = [run], folder.name if unique else str(run)
        if (run / SWEEP).exists():
            scored += [{**row, "run": name} for row in _sweep_rows(run)]
            of_run = sorted((run / SCORED).glob(f"*/*/{FILE}"))
        results += [(name, _read_scores(path)) for path in of_run]
    # By resolved paths, because runs may name one folder in several ways.
    speeds = list[tuple[str, dict[str, Any]]]()
    for name, result in results:
        for row in result.get("models", ()):
            about = {key: result[key] for key in ("settings", "length", "hardware", "devices")}
            speeds.append((_resolved_name(row["model"]), {"run": name, **about, **row}))
        for entry in (*_each_model(result), *_means(result)) if "mean" in result else ():
            scored += [{**row, "run": name} for row in _score_rows(entry)]
    rows, met = [], set[str]()
    # A stable sort: students of a sweep stay in their order, the best first.
    for row in sorted(scored, key=lambda row: (row["task"], row["data"])):
        names = row.pop("names")
        met |= names
        measured: list[Any] = [speed for model, speed in speeds if model in names]
        rows += [{**row, "speed": speed} for speed in measured or [None]]
    rows += [_unscored(speed) for model, speed in speeds if model not in met]
    return {"task": "table", "rows": rows}


def _each_model(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Split the result of several models that were scored without training into one result per
    model. Returns [] for the result of one model."""
    runs = result["seeds"]
    if not result.get("settings", {}).get("as_is") or len(runs) < 2:
        return []
    return [
        {
            **result,
            "model": run["model"],
            "saved": [],
            "examples": run["examples"],
            **_averaged([run], list(result["mean"])),
        }
        for run in runs
    ]


def _means(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the result of one model, whose scores are means over seeds, as a list. For several
    models scored without training, return the result with their mean, or [] unless they are
    `_alike`."""
    if not _each_model(result):
        return [result]
    return [{**result, "model": "mean", "saved": []}] if _alike(result["saved"]) else []


def _score_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tests = [name for name in result["mean"] if name.startswith(TEST)]
    for split in tests or ["dev"]:
        yield {
            "task": result["task"],
            "data": ", ".join(filter(None, (_data(result, split, tests), result.get("setup")))),
            "model": result["model"],
            "names": {
                _resolved_name(model) for model in (result["model"], *result.get("saved", ()))
            },
            "split": split,
            "seeds": len(result["seeds"]),
            "scale": result["scale"],
            "decimals": result.get("decimals", 2),
            "measures": result["measures"],
            "mean": {split: result["mean"][split]},
            "deviation": {split: result["deviation"][split]},
        }


def _sweep_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each student of a sweep, the best first. Raises UserError if no student is
    finished."""
    try:
        students = ranked(json.loads((folder / SWEEP).read_text("utf-8")))
        if not students:
            raise UserError(
                f"run {folder}: none of its students is finished; run the same student-sweep again"
            )
        for student in students:
            figures = {name: student[key] for name, key in OF_A_SWEEP.items() if key in student}
            model = str(folder / student["folder"])
            yield {
                "task": "sweep",
                "data": "held out of the store",
                "model": model,
                "names": {_resolved_name(model)},
                "split": "held-out",
                "seeds": 1,
                "scale": 1 if NATS in figures else SHARES,
                "measures": {name: name for name in figures},
                "mean": {"held-out": figures},
                "deviation": {"held-out": dict.fromkeys(figures, 0.0)},
            }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"run {folder}: its {SWEEP} was not written by student-sweep ({error}); run the sweep"
            " again"
        ) from None


def _unscored(speed: dict[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"split": "", "seeds": 0, "measures": {}, "scale": SHARES}
    nothing |= {"mean": {"": {}}, "deviation": {"": {}}}
    about = {"task": "speed", "data": "", "model": speed["model"], "run": speed["run"]}
    return {**about, **nothing, "speed": speed}


def _resolved_name(model: str) -> str:
    """Return the resolved path if a model is a folder, else its name unchanged."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _data(result: dict[str, Any], split: str, tests: Sequence[str]) -> str:
    """Return the name of the scored file; with several test files its path, as names may repeat."""
    file = result["files"].get(split)
    if file:
        return file if len(tests) > 1 else Path(file).name
    if split == TEST:
        return f"mean of {len(tests) - 1} files"
    return f"held out of {', '.join(Path(file).name for file in result['files']['train'])}"


def _read_scores(run: Path) -> dict[str, Any]:
    path = run / FILE if run.is_dir() else run
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if any(of_a_run <= set(result) for of_a_run in (OF_SCORES, OF_SPEED)):
            return dict(result)
        problem = "is several runs in a table" if "rows" in result else "is not a run of downstream"
    except OSError:
        problem = f"no finished run, it has no {FILE}"
    except (ValueError, TypeError) as error:
        problem = f"not written by downstream ({error})"
    raise UserError(
        f"run {run}: {problem}; give --out folders that downstream wrote for any other task"
    )


def combined_table(result: dict[str, Any]) -> Table:
    """Make a table with a row for each run and a column for each figure; shares in percent.

    The title names the hardware and settings of the speeds. If they differ between runs, the title
    numbers them, and the column `measured` has the numbers.
    """
    rows = result["rows"]
    measures = list(dict.fromkeys(name for row in rows for name in row["measures"]))
    speeds = [_speed_cells(row["speed"]) if row["speed"] else {} for row in rows]
    ways = list(dict.fromkeys(_measured(row["speed"]) for row in rows if row["speed"]))
    headings = [*measures, *dict.fromkeys(name for cells in speeds for name in cells)]
    if len(ways) > 1:
        headings.append("measured")
    title = [f"{number}: {way}" if len(ways) > 1 else way for number, way in enumerate(ways, 1)]
    table = _table("\n".join(title), (*ABOUT, *headings))
    for row, cells in zip(rows, speeds, strict=True):
        split, several = row["split"], row["seeds"] > 1
        deviation = row["deviation"][split] if several else None
        cells |= dict(zip(row["measures"], _cells(row, row["mean"][split], deviation), strict=True))
        if row["speed"]:
            cells["measured"] = str(1 + ways.index(_measured(row["speed"])))
        data = f"{row['data']} (dev)" if row["split"] == "dev" else row["data"]
        about = row["task"], data, row["model"], row["run"], str(row["seeds"] or "")
        table.add_row(*about, *(cells.get(name, "") for name in headings))
    return table


def speed_table(result: dict[str, Any]) -> Table:
    """Make a table with a row for each model. A figure followed by (1/N) is one Nth of the
    teacher's."""
    rows = [(row["model"], _speed_cells({**result, **row})) for row in result["models"]]
    table = _table(_measured(result), ("model", *rows[0][1]))
    for model, cells in rows:
        table.add_row(model, *cells.values())
    return table


def _measured(speed: dict[str, Any]) -> str:
    runs = counted(speed["settings"]["runs"], "run")
    return f"median of {runs} (lower to upper quartile) on {speed['hardware']}"


def _speed_cells(speed: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a speed measurement as text, by heading."""
    ratios = speed.get("ratio", {})
    # Sizes in different dtypes cannot be compared: the same weights take half the bytes in fp16.
    dtype = speed.get("disk_dtype", "")
    cells = {
        "parameters": _figure(speed, ratios, "parameters", lambda n: f"{n / 1e6:.2f} M"),
        "disk": _figure(speed, ratios, "disk_bytes", lambda n: f"{readable(n)} {dtype}".rstrip()),
    }
    batch = f"{speed['settings']['batch_size']} x {speed['length']}"
    for device in speed["devices"]:
        for label, key in ((batch, "batch"), ("sentence", "sentence")):
            of = speed[device], ratios.get(device, {})
            cells[f"{device} {label}, ms"] = _figure(*of, f"{key}_ms", "{:,.2f}".format)
            cells[f"{device} {label}, memory"] = _figure(*of, f"{key}_memory_bytes", readable)
    return cells


def _figure(
    figures: dict[str, Any], ratios: dict[str, float], name: str, format: Callable[[float], str]
) -> str:
    if figures.get(name) is None:
        return "not known"
    low, high = figures.get(f"{name}_quartiles", (0, 0))
    spread = f" ({format(low)} to {format(high)})" if low < high else ""
    return format(figures[name]) + spread + (f" (1/{ratios[name]:.1f})" if name in ratios else "")


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    return table
