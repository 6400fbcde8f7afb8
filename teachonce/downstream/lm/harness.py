"""The tasks `lm-eval:NAME`: score a decoder on a task of lm-evaluation-harness."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from teachonce.checkpoints.first_token import prepended_token
from teachonce.checkpoints.loading import input_limit
from teachonce.downstream.lm.scoring import BITS, CELLS, LONGEST, load_decoder
from teachonce.downstream.lm.windows import start_token
from teachonce.downstream.options import TEST
from teachonce.downstream.score_tables import result_of
from teachonce.downstream.settings import LmSettings
from teachonce.student_train.output.ranking import SMALLER_IS_BETTER
from teachonce.support.errors import UserError, first_line, out_of_memory, suggest
from teachonce.support.packages import library

HEADINGS = {"bits_per_byte": BITS}
"""Measures that have another name here."""


def score_harness_task(
    task: str, model: str, folders: Sequence[Path], settings: LmSettings
) -> dict[str, Any]:
    """Score a decoder by the measures that a task of lm-evaluation-harness defines.

    task: `lm-eval:NAME`, a task or a group of tasks.
    folders: where to look for definitions of tasks (YAML), in addition to the harness's own. The
        harness fetches the data of a task from the hub, unless its definition names local files.

    Returns the same dictionary as `fine_tune.score_as_is`; its examples are documents. Figures have
    the harness's scale: accuracies are shares.

    Raises UserError if the harness is missing, has no such task, or cannot score it.
    """
    harness: Any = library("lm_eval", "lm-eval", f"--task {task}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each default value
    tasks, name = _tasks(folders, task), task.partition(":")[2]
    if name in {*tasks.all_tags}:
        parts = ", ".join(sorted(tasks.task_index[name]["task"]))
        raise UserError(
            f"--task {task}: is a tag (a list of tasks), which has no score; give one of its tasks:"
            f" {parts}"
        )
    if name not in {*tasks.all_tasks}:
        near = suggest(name, tasks.all_tasks)
        raise UserError(
            f"--task {task}: lm-evaluation-harness has no such task; {near}`lm-eval ls tasks` lists"
            " its own, and --test FOLDER adds the definitions in a folder"
        )
    tokenizer, network = load_decoder(model, settings.precision)
    length = min(settings.max_length or LONGEST, input_limit(network.config, tokenizer))
    at_once = max(1, CELLS // (length * network.config.vocab_size))
    read = _harness_model(task)(
        pretrained=network,
        tokenizer=tokenizer,
        batch_size=at_once,
        max_length=length,
        # Releases of the harness differ in what they leave out by default.
        add_bos_token=prepended_token(tokenizer.backend_tokenizer) is not None,
        prefix_token_id=start_token(tokenizer),
    )
    try:
        report = harness.simple_evaluate(
            model=read,
            tasks=[name],
            task_manager=tasks,
            bootstrap_iters=0,  # no standard errors: they are over documents, ours are over seeds
            log_samples=False,
        )
    except Exception as error:  # any error of the hub, of data sets, of a task's definition
        if out_of_memory(error):
            raise
        raise UserError(
            f"--task {task}: lm-evaluation-harness could not score {model}: {first_line(error)};"
            " data that a task does not have in local files come from the hub: connect to it,"
            " or copy the cache of datasets from a machine that is connected"
        ) from error
    figures = _figures(report["results"].get(name, {}))
    if not figures:
        parts = ", ".join(sorted(report["results"]))
        raise UserError(f"--task {task}: has no score of its own; give one of its tasks: {parts}")
    measures = {_heading(key, report["higher_is_better"][name]): key for key in figures}
    primary = next(iter(figures))
    about = {"task": task, "measures": measures, "primary": primary, "scale": 1, "decimals": 4}
    counts = report.get("n-samples", {})
    documents = sum(int(count["effective"]) for count in counts.values())
    shown = {"as_is": True, "max_length": length, "precision": settings.precision}
    shown["lm-eval"] = version("lm-eval")
    run = {TEST: {"primary": figures[primary], **figures}}
    return result_of(about, model, {TEST: name}, shown, {TEST: documents}, [run])


def _harness_model(task: str) -> Any:
    """Return a subclass of the harness's `HFLM`, the class of transformers models. It reads whole
    texts as `score_lm` does, with a single start token."""
    hflm: Any = library("lm_eval.models.huggingface", "lm-eval", f"--task {task}").HFLM

    class WholeTexts(hflm):  # type: ignore[misc]
        add_bos_token: bool | None

        def loglikelihood_rolling(self, *arguments: Any, **named: Any) -> Any:
            # The harness puts `prefix_token_id` in front of a whole text itself. A bos of the
            # tokenizer would come after it, as a token to predict.
            before, self.add_bos_token = self.add_bos_token, False
            try:
                return super().loglikelihood_rolling(*arguments, **named)
            finally:
                self.add_bos_token = before

    return WholeTexts


def _tasks(folders: Sequence[Path], task: str) -> Any:
    """Return the harness's `TaskManager`, which lists its own tasks and the tasks that are defined
    in `folders`."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"--test {folder}: --task lm-eval takes folders with definitions of tasks"
            )
    manager = library("lm_eval.tasks", "lm-eval", f"--task {task}").TaskManager
    return manager(include_path=[*map(str, folders)] or None)


def _heading(measure: str, higher_is_better: Mapping[str, bool]) -> str:
    """Return the heading of a measure. It ends with an arrow if smaller values are better."""
    if measure in HEADINGS:
        return HEADINGS[measure]
    larger = higher_is_better.get(measure.partition(" ")[0])
    return measure if larger is None or larger else f"{measure}{SMALLER_IS_BETTER}"


def _figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a task, without standard errors, by the name of the measure. If the
    harness filtered the answers, the name ends with the name of the filter."""
    figures = {}
    for key, value in result.items():
        # Keys are `measure,filter`; those without a comma, such as `alias`, are not measures.
        name, comma, filter_name = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            figures[name if filter_name == "none" else f"{name} {filter_name}"] = float(value)
    return figures
