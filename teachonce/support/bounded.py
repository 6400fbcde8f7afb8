"""Run a function on untrusted data in a separate process, with limits of time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from teachonce.support.errors import UserError, first_line

THREADS = 4  # of tokenizers (Rayon); each takes address space of its own
PATIENCE = 10  # ratio of the wall-clock limit to the CPU limit: the machine may be busy
PR_SET_PDEATHSIG = 1
inside = False  # whether this is the process with limits
CHILD = """
import json, sys
call = json.load(sys.stdin)
sys.path[:] = call.pop("path")
from teachonce.support.bounded import _child
_child(**call)
"""


class LimitExceeded(UserError):
    """Raised if the function exceeds a limit or crashes; the message names the limit."""


def run_bounded(function: Callable[..., Any], *arguments: Any, seconds: float, memory: int) -> Any:
    """Return `function(*arguments)`, computed in a process with limits.

    function: defined at the top level of a module; its arguments and result are JSON values.
    seconds: limit of CPU time. memory: limit of address space in bytes.

    Raises LimitExceeded if the process exceeds a limit or crashes; UserError with the first line of
    any error that the function raises; TypeError for an argument that is not JSON.
    """
    # glibc reserves 64 MB of address space for each arena, by default up to 8 of them a core.
    environment = {**os.environ, "RAYON_NUM_THREADS": str(THREADS), "MALLOC_ARENA_MAX": "2"}
    target = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
    bounds = {"seconds": seconds, "memory": memory}
    # JSON in both directions, not pickle: if crafted data take the child over, its answer must run
    # no code here. The path is passed because -I ignores PYTHONPATH and the user's packages.
    call = json.dumps({"path": sys.path, **target, **bounds}).encode()
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", CHILD],  # else it looks for modules in the current folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A library in Rust prints a panic there, before Python can catch it.
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        answer, _ = process.communicate(call, timeout=seconds * PATIENCE)
    except subprocess.TimeoutExpired:
        raise LimitExceeded(f"took longer than {seconds:,.0f} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == -signal.SIGXCPU:
        raise LimitExceeded(f"took longer than {seconds:,.0f} s")
    try:
        result = json.loads(answer)
        if not isinstance(result, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise LimitExceeded(
            f"crashed, or needed more than {memory / 2**30:.3g} GB of memory (exit code"
            f" {process.returncode})"
        ) from None
    if "error" in result:
        raise UserError(result["error"])
    return result["value"]


def _child(module: str, name: str, arguments: list[Any], seconds: float, memory: int) -> None:
    """Run as the main function of the process that `run_bounded` starts."""
    import resource

    global inside
    inside = True
    out = os.dup(1)
    os.dup2(2, 1)  # stdout carries the answer, and a library may print to it
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # killed when its parent ends
    # Ctrl-C reaches the parent as well, which then kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A core dump would write the memory of a crashed child to the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The soft limit sends SIGXCPU, which the parent reports; the hard one kills if it is ignored.
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 6))
    with contextlib.suppress(ValueError, OSError):  # macOS has no bound of memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        function = getattr(importlib.import_module(module), name)
        answer = json.dumps({"value": function(*arguments)})
    except MemoryError:
        # Exits without an answer, which would take memory; the parent then reports the limit.
        os._exit(1)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        answer = json.dumps(
            {"error": str(error) if isinstance(error, UserError) else first_line(error)}
        )
    with open(out, "w") as file:
        file.write(answer)
    os._exit(0)
