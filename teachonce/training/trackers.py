"""Send the figures of a training to experiment trackers (Weights & Biases, MLflow, Trackio).

accelerate is the client. Each package is optional, and imported when its tracker is requested.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import UserError, first_line
from teachonce.support.parsing import read_json
from teachonce.support.redaction import redacted

TRACKERS = ("wandb", "mlflow", "trackio")
"""Names of the packages to import and to install."""
PROJECT = "teachonce"  # unless the environment names another one
RUNS = "trackers.json"
"""File in a student's folder: the run of each tracker, which a resumed training continues."""
LONGEST = 500  # characters of a setting; MLflow takes up to 6,000


@dataclass(frozen=True)
class RunDescription:
    """Describes a training to a tracker.

    folder: the student's folder; the run is named after it and its parent. figures: the files that
        have the same figures. resumable: whether the training can be resumed.
    """

    folder: Path
    settings: Mapping[str, Any]
    figures: str = "metrics.jsonl and tensorboard/"
    resumable: bool = True

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def group(self) -> str:
        return self.folder.resolve().parent.name

    def plain(self) -> dict[str, str | int | float | bool]:
        """Return the settings as plain values, without credentials in URLs. A list or a table
        becomes JSON."""
        return {
            name: value if isinstance(value, str | int | float | bool) else json.dumps(value)
            for name, value in redacted(dict(self.settings)).items()
            if value not in (None, "", [], {})
        }


def parse_trackers(words: str | Iterable[str]) -> tuple[str, ...]:
    """Parse names of trackers, given as words or comma-separated lists."""
    given = [words] if isinstance(words, str) else words
    names = [name.strip() for word in given for name in word.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def check_known(names: Iterable[str]) -> None:
    """Raise UserError for a name that is not a tracker."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"--log {name}: expected {', '.join(TRACKERS)}, or a comma-separated list of them"
            )


def check_installed(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--log {name}: {name} is not installed; `pip install {name}`, or leave --log"
                f" {name} out"
            )


class Trackers:
    """Sends the figures of a training to some trackers.

    If a tracker fails during the training, one line reports it, and it receives no more figures.
    The training continues, and its figures are also in its folder.
    """

    def __init__(
        self,
        names: Iterable[str],
        facts: RunDescription,
        resume: bool,
        say: Callable[[str], object],
    ) -> None:
        """Start a run with each tracker, or resume the runs of the folder. Raises UserError if one
        cannot start."""
        self._say, self._facts, self._open = say, facts, dict[str, Any]()
        path = facts.folder / RUNS
        remedy = "; remove it to start new runs"
        runs = read_json(path, {"*": str}, remedy) if resume and path.exists() else {}
        for name in names:
            try:
                with redirect_stdout(sys.stderr):  # with --json, stdout has only JSON
                    self._open[name], runs[name] = _start(name, facts, runs.get(name))
            except Exception as error:  # each tracker raises its own
                self.close(False)
                raise UserError(
                    f"--log {name}: cannot start ({first_line(error)}); check its settings and the"
                    f" network, or leave --log {name} out"
                ) from error
        if self._open and facts.resumable:
            files.write(path, json.dumps(runs).encode())

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda name, tracker: tracker.log(dict(values), step, **LOGGED.get(name, {})))

    def close(self, finished: bool) -> None:
        """End all runs; `finished` is False if the training was stopped."""
        with redirect_stdout(sys.stderr):
            self._each(lambda name, tracker: _finish(name, tracker, finished))
        self._open.clear()

    def _each(self, send: Callable[[str, Any], object]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                send(name, tracker)
            except Exception as error:  # each tracker raises its own
                del self._open[name]
                self._say(
                    f"log       {name} fails and is disabled ({first_line(error)}); the figures"
                    f" are in {self._facts.figures}"
                )


LOGGED = {"mlflow": {"synchronous": False}}
"""Arguments of `log`: by itself MLflow waits for the server's answer at every step."""


def _start(name: str, facts: RunDescription, id: str | None) -> tuple[Any, str]:
    """Start a run, or resume run `id`; return accelerate's tracker and the run's id.

    The environment variables WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, TRACKIO_PROJECT,
    TRACKIO_SPACE_ID, TRACKIO_DIR, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.
    """
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's trackers log messages, which fail without it
    group, project = facts.group, os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    tracker: Any
    if name == "mlflow":
        tracker = tracking.MLflowTracker(
            PROJECT, run_id=id, run_name=facts.name, tags={"group": group}
        )
        tracker.start()
        if id is None:
            settings = {key: str(value)[:LONGEST] for key, value in facts.plain().items()}
            tracker.store_init_configuration(settings)
        return tracker, str(tracker.tracker.info.run_id)
    options: dict[str, Any] = {"group": group, "config": facts.plain(), "resume": "allow"}
    if name == "wandb":
        id = id or os.urandom(4).hex()
        options |= {"id": id, "name": facts.name, "dir": str(facts.folder)}
        options |= {"reinit": "create_new"}  # a sweep starts several runs in one process
        tracker = tracking.WandBTracker(project, **options)
    else:
        id = id or f"{facts.name}-{os.urandom(4).hex()}"
        tracker = tracking.TrackioTracker(project, **options, name=id, embed=False)
    tracker.start()
    return tracker, id


def _finish(name: str, tracker: Any, finished: bool) -> None:
    """End a run. If it is not `finished`, mark it as stopped, which accelerate cannot do."""
    if name == "wandb":
        tracker.tracker.finish(exit_code=0 if finished else 1)
    elif name == "mlflow":
        import mlflow

        mlflow.flush_async_logging()
        mlflow.end_run("FINISHED" if finished else "KILLED")
    else:
        tracker.finish()
