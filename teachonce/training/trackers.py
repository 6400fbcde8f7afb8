"""Trackers of experiments that a training tells its figures to: Weights & Biases, MLflow, Trackio.

None of them is needed: each is imported when it is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import UserError, first_line

PROJECT = "teachonce"  # where the environment names no other
RUNS = "trackers.json"
"""File of a student's folder: by the name of a tracker its run, with which a resume goes on."""
EVERY = 10.0  # seconds between two messages to MLflow, which sends at once
MOST = 1000  # figures of a message, as MLflow takes them
LONGEST = 500  # characters of a setting; MLflow takes up to 6,000


@dataclass(frozen=True)
class Facts:
    """What a tracker shows of a training: its name and that of the folder around it, its settings,
    and its folder; where else its figures are; whether a training of before can be gone on with."""

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

    def told(self) -> dict[str, str | int | float | bool]:
        """Return the settings as plain values; what is a list or a table is JSON."""
        return {
            name: value if isinstance(value, str | int | float | bool) else json.dumps(value)
            for name, value in self.settings.items()
            if value not in (None, "", [], {})
        }


class Tracker(ABC):
    """A run of a training with a tracker. Its `id` goes on with it in another process."""

    id: str

    @abstractmethod
    def add(self, values: Mapping[str, float], step: int) -> None:
        """Tell figures of a step."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """End the run, which has come to its end or was stopped."""


class WandbTracker(Tracker):
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE of the environment
    hold."""

    def __init__(self, library: Any, facts: Facts, id: str | None) -> None:
        self.id = id or uuid.uuid4().hex[:8]
        self._run = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=facts.name,
            group=facts.group,
            config=facts.told(),
            dir=str(facts.folder),
            resume="allow",
            reinit="create_new",  # a sweep has one after another
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class TrackioTracker(Tracker):
    """A run of Trackio; TRACKIO_PROJECT, TRACKIO_SPACE_ID and TRACKIO_DIR of the environment
    hold."""

    def __init__(self, library: Any, facts: Facts, id: str | None) -> None:
        self.id = id or f"{facts.name}-{uuid.uuid4().hex[:8]}"
        self._run = library.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            group=facts.group,
            config=facts.told(),
            resume="allow",
            embed=False,
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """A run of MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME of the environment hold.

    Figures are gathered for some seconds, as each message is waited for.
    """

    def __init__(self, library: Any, facts: Facts, id: str | None) -> None:
        self._library, self._client = library, library.MlflowClient()
        if id is None:
            run = self._client.create_run(
                self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)),
                run_name=facts.name,
                tags={"group": facts.group},
            )
            self.id = str(run.info.run_id)
            told = {name: str(value)[:LONGEST] for name, value in facts.told().items()}
            kinds = library.entities
            self._client.log_batch(self.id, params=[kinds.Param(*each) for each in told.items()])
        else:
            self.id = id
            self._client.update_run(self.id, status="RUNNING")
        self._gathered: list[Any] = []
        self._sent = time.monotonic()

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def add(self, values: Mapping[str, float], step: int) -> None:
        now, metric = int(time.time() * 1000), self._library.entities.Metric
        self._gathered += [metric(name, value, now, step) for name, value in values.items()]
        if len(self._gathered) >= MOST or time.monotonic() - self._sent > EVERY:
            self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._gathered:
            self._client.log_batch(self.id, metrics=self._gathered[:MOST])
            del self._gathered[:MOST]

    def close(self, finished: bool) -> None:
        self._send()
        self._client.set_terminated(self.id, status="FINISHED" if finished else "KILLED")


TRACKERS: dict[str, Callable[[Any, Facts, str | None], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""What begins a run, or goes on with one, by the name of the package to import and to install."""


def parse_trackers(words: str | Iterable[str]) -> tuple[str, ...]:
    """Read words that are names of trackers, or comma lists of them."""
    given = [words] if isinstance(words, str) else words
    names = [name.strip() for word in given for name in word.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def check_known(names: Iterable[str]) -> None:
    """Raise UserError for a name that is no tracker's."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"--log {name}: expected {', '.join(TRACKERS)}, or a comma list of them"
            )


def check_installed(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--log {name}: {name} is not installed; `pip install {name}`, or leave it out"
            )


class Trackers:
    """Tells the figures of a training to some trackers.

    A tracker that fails while the training runs is told in a line, once, and told no more; the
    training goes on, and its figures stand in its folder.
    """

    def __init__(
        self, names: Iterable[str], facts: Facts, resume: bool, say: Callable[[str], object]
    ) -> None:
        """Begin a run with each, or go on with those of the folder. Raises UserError where one
        cannot begin."""
        self._say, self._facts, self._open = say, facts, dict[str, Tracker]()
        path = facts.folder / RUNS
        before = json.loads(path.read_text()) if resume and path.exists() else {}
        for name in names:
            try:
                with redirect_stdout(sys.stderr):  # of a sweep stdout may be JSON
                    library = importlib.import_module(name)
                    self._open[name] = TRACKERS[name](library, facts, before.get(name))
            except Exception as error:  # each tracker raises its own
                self.close(False)
                raise UserError(
                    f"--log {name}: cannot begin ({first_line(error)}); check its settings and the"
                    " network, or leave it out"
                ) from error
        if self._open and facts.resumable:
            runs = before | {name: tracker.id for name, tracker in self._open.items()}
            files.write(path, json.dumps(runs).encode())

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Tell figures of a step."""
        self._each(lambda tracker: tracker.add(values, step))

    def close(self, finished: bool) -> None:
        """End all runs; `finished` is False where the training was stopped."""
        with redirect_stdout(sys.stderr):
            self._each(lambda tracker: tracker.close(finished))
        self._open.clear()

    def _each(self, tell: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                tell(tracker)
            except Exception as error:  # each tracker raises its own
                del self._open[name]
                self._say(
                    f"log       {name} fails and is told no more ({first_line(error)}); the figures"
                    f" are in {self._facts.figures}"
                )
