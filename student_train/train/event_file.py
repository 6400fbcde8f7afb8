"""Write event files of TensorBoard synchronously."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from teachonce.support import files


class EventFile:
    """Writes scalars over steps for TensorBoard; methods raise OSError if the disk fails."""

    # Not torch's SummaryWriter: its thread prints errors of the disk, and later events are lost.

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Create a new file. TensorBoard ignores scalars of step `purge_step` and later in older
        files."""
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
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
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()
