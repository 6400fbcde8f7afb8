"""The tasks `mteb:NAME`: score a model, without training, on a task of the package mteb."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from teachonce.checkpoints.embedders import Embedder
from teachonce.downstream.options import TEST
from teachonce.downstream.score_tables import SHARES, result_of
from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.support.packages import library


def score_benchmark(task: str, model: str, max_length: int | None) -> dict[str, Any]:
    """Score a model by the main score of an mteb task, the mean over its languages (subsets).

    task: `mteb:NAME`. mteb fetches the data from the hub.
    Returns the same dictionary as `fine_tune`, for one run without a seed.

    Raises UserError if mteb is missing, has no such task, or cannot fetch the data.
    """
    mteb: Any = library("mteb", "mteb", f"--task {task}")
    name = task.partition(":")[2]
    try:
        benchmark = mteb.get_task(name)
    except KeyError as error:
        raise UserError(f"--task {task}: mteb has no such task: {first_line(error)}") from None
    embedder = Embedder(model, max_length)
    split = TEST if TEST in benchmark.eval_splits else benchmark.eval_splits[0]
    try:
        # By default mteb returns the scores that it has stored for a model of this name; the model
        # may have been trained again since.
        results = mteb.evaluate(embedder.model, benchmark, cache=None, show_progress_bar=False)
        scores = results.task_results[0].scores[split]
    except Exception as error:  # any error of the hub, of data sets, of the task's own code
        if out_of_memory(error):
            raise
        raise UserError(
            f"--task {task}: mteb could not score {model}: {first_line(error)}; its data come from"
            " the hub: connect to it, or copy the cache of datasets from a machine that is"
            " connected"
        ) from error
    figure = fmean(float(subset["main_score"]) for subset in scores)
    about = {
        "task": task,
        "measures": {str(benchmark.metadata.main_score): "main_score"},
        "primary": "main_score",
        "scale": SHARES,
    }
    settings = {"as_is": True, "max_length": max_length, "mteb": mteb.__version__, "split": split}
    run = {TEST: {"primary": figure, "main_score": figure}}
    data = benchmark.dataset
    plain = isinstance(data, dict) and split in data  # else each language has a table
    rows = len(data[split]) if plain else 0
    return result_of(about, model, {TEST: f"{name} {split}"}, settings, {TEST: rows}, [run])
