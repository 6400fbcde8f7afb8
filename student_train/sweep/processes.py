"""Execute the runs of a sweep in several processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process, process

from teachonce.student_train.sweep.execution import Event, Work, error_line, finish
from teachonce.support.environment import variable
from teachonce.support.signals import Stopped, stoppable


class Processes:
    """Runs workers in `jobs` processes; if there are several GPUs, each process has one."""

    deaths = 1  # no repetition: the cause, often memory, would end the next process as well

    def __init__(self, jobs: int, gpus: int) -> None:
        self._jobs, self._gpus = jobs, gpus
        self._running = dict[int, tuple[int, connection.Connection, process.BaseProcess]]()

    def places(self) -> int:
        return self._jobs

    def start(self, number: int, work: Work) -> None:
        # GPUs are chosen by slot, not by run number, so that parallel students are on different
        # GPUs.
        slot = min(set(range(self._jobs)) - {slot for slot, *_ in self._running.values()})
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        parent_end, child_end = context.Pipe()
        gpu = slot % self._gpus if self._gpus else None
        child = context.Process(target=in_child, args=(work, gpu, child_end))
        child.start()
        child_end.close()  # otherwise `recv` would wait forever after the child's end
        self._running[number] = slot, parent_end, child

    def events(self) -> list[Event]:
        """Wait until a child sends an event or exits; return the events of all children."""
        ready = connection.wait([pipe for _, pipe, _ in self._running.values()])
        events = list[Event]()
        for number, (_, pipe, child) in list(self._running.items()):
            if pipe not in ready:
                continue
            try:
                events.append((number, *pipe.recv()))
            # EOFError, or ConnectionResetError if the child has not read our last answer.
            except (EOFError, OSError):
                child.join()
                events.append((number, "died", _describe_exit(child.exitcode)))
            if events[-1][1] in ("ended", "died"):
                child.join()
                del self._running[number]
        return events

    def answer(self, number: int, why: str) -> None:
        with suppress(OSError):  # the worker has died; `events` reports that
            self._running[number][1].send(why)

    def stop(self) -> None:
        """Make the children save their students and exit."""
        # Validations are still answered: a child that waits for an answer could not save.
        for _, _, child in self._running.values():
            child.terminate()
        while self._running:
            for number, kind, *_ in self.events():
                if kind == "validated":
                    self.answer(number, "")


@contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """Divide the cores among the children (unless OMP_NUM_THREADS is set); hide progress bars."""
    # The bars of several children would overwrite one another.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    with variable("OMP_NUM_THREADS", threads), variable("TQDM_DISABLE", "1"):
        yield


def in_child(work: Work, gpu: int | None, parent: connection.Connection) -> None:
    """Train and score a student in this process, and send events to the parent.

    When the parent exits, the process saves its student and exits.
    """
    os.setpgrp()  # Ctrl-C goes to the parent, which stops its children one by one
    if gpu is not None:
        # Before torch is imported: CUDA reads the variable only when it starts.
        # `gpu` counts the devices that the parent sees, which may be some of the machine's.
        visible = [*filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) else str(gpu)
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    def end_reason(step: int, figures: dict[str, float]) -> str:
        parent.send(("validated", step, figures))
        return str(parent.recv())

    def say(line: str) -> None:
        parent.send(("say", line))

    try:
        with stoppable():
            from teachonce.student_train.output.run import open_stores

            try:
                with open_stores(work.options) as stores:
                    ended = finish(work, stores, None, end_reason, say)
            except Exception as error:
                ended = ("failed", {}, error_line(error))
            parent.send(("ended", *ended))
    # BrokenPipeError: the parent has ended, and nobody reads the events.
    except (Stopped, BrokenPipeError) as stopped:
        # Not os._exit, which leaves semaphores behind (progress bars have some):
        # multiprocessing's resource tracker would print a warning for each.
        sys.exit(128 + (stopped.number if isinstance(stopped, Stopped) else signal.SIGTERM))


def _describe_exit(code: int | None) -> str:
    """Describe the exit of a process that sent no result."""
    if code == -signal.SIGKILL:
        return "its process was killed, probably for lack of memory; give fewer --jobs"
    return f"its process exited with code {code}"


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    # A signal, because only the main thread can save the student: see `stoppable`.
    os.kill(os.getpid(), signal.SIGTERM)
