"""The figures of a training: metrics.jsonl, an event file of TensorBoard, and trackers."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from teachonce.student_train.settings.options import TrainOptions
from teachonce.support import files
from teachonce.training.trackers import RunDescription, Trackers

METRICS = "metrics.jsonl"


class TrainingLog:
    """Writes the figures of each step to a training's folder, and sends them to trackers.

    Only one process of a training has a log.
    """

    def __init__(
        self,
        folder: Path,
        options: TrainOptions,
        say: Callable[[str], object],
        resumed_after: int | None = None,
    ) -> None:
        """Open the files, and start or resume the runs of trackers.

        resumed_after: the step from which a resumed training continues. Later steps that a killed
            process logged are logged again.

        Raises UserError if a tracker cannot start.
        """
        self._metrics = folder / METRICS
        resume = resumed_after is not None
        # Before the trackers: if it fails, none of their runs is left open.
        self._events = EventFile(
            folder / "tensorboard", None if resumed_after is None else resumed_after + 1
        )
        self._trackers = Trackers(
            options.log, RunDescription(folder, options.describing()), resume, say
        )

    def add(self, values: dict[str, float], step: int) -> None:
        """Write the figures of a step. Raises OSError if the disk fails."""
        # The file is opened for each line: nothing is buffered that a kill would lose.
        files.append(self._metrics, json.dumps({"step": step, **values}).encode() + b"\n")
        self._events.add(values, step)
        self._trackers.add(values, step)

    def close(self, finished: bool) -> None:
        """Close the files; `finished` is False if the training was stopped."""
        self._events.close()
        self._trackers.close(finished)


def cut_metrics(folder: Path, written: int) -> bool:
    """Cut metrics.jsonl to `written` bytes, its length at a checkpoint: later lines are written
    again.

    Returns False if the file is shorter, so that lines are missing; then an incomplete last line is
    removed.
    """
    metrics = folder / METRICS
    size = metrics.stat().st_size if metrics.exists() else 0
    if size >= written:
        if size > written:
            files.truncate(metrics, written)
        return True
    files.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1 if size else 0)
    return False


class EventFile:
    """Writes scalars over steps for TensorBoard; methods raise OSError if the disk fails."""

    # Not torch's SummaryWriter: its thread prints errors of the disk, and later events are lost.

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Create a new file. TensorBoard ignores scalars of step `purge_step` and later in older
        files."""
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names: the time comes first.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered, so that an error of the disk is raised by the record that it concerns.
        self._file = os.fdopen(files.create(folder / name), "wb", buffering=0)
        self._records = RecordWriter(self)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, values: dict[str, float], step: int) -> None:
        """Write scalars of a step. Raises OSError."""
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._write(Event(step=step, summary=summary))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())

    def write(self, data: bytes) -> None:
        """Write one record. Raises OSError if it does not fit on the disk."""
        # An unbuffered file may take a part of the bytes without an error.
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()
