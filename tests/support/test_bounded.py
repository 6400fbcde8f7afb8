"""Functions in a process with limits: results, errors, and what happens beyond a limit."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from teachonce.support.bounded import LimitExceeded, run_bounded
from teachonce.support.errors import UserError

MEMORY = 3 << 30  # more than any function here takes, except `fill`


def add(one: int, other: int) -> dict[str, int]:
    print("what a library prints is no answer")
    return {"sum": one + other}


def refuse() -> None:
    raise UserError("a line for a person")


def fail() -> None:
    raise KeyError("of the code")


def spin() -> None:
    while True:
        pass


def fill() -> int:
    return len([bytearray(1 << 24) for _ in range(1 << 12)])


def crash() -> None:
    os.abort()


def exit_early() -> None:
    raise SystemExit(3)


def answer_a_list() -> None:
    for number in range(3, 9):  # one is the pipe for the result
        with suppress(OSError):
            os.write(number, b"[]")
    os._exit(0)


def test_results_and_errors_come_back() -> None:
    assert run_bounded(add, 1, 2, seconds=20, memory=MEMORY) == {"sum": 3}
    for function, line in ((refuse, "a line for a person"), (fail, "'of the code'")):
        with pytest.raises(UserError, match=line) as error:
            run_bounded(function, seconds=20, memory=MEMORY)
        assert not isinstance(error.value, LimitExceeded)


def test_time_has_a_bound() -> None:
    started = time.monotonic()
    with pytest.raises(LimitExceeded, match="took longer than 1 s"):
        run_bounded(spin, seconds=1, memory=MEMORY)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("function", [fill, crash, exit_early, answer_a_list])
def test_memory_has_a_bound_and_a_crash_is_a_line(function: object) -> None:
    with pytest.raises(UserError) as error:
        run_bounded(function, seconds=20, memory=1 << 30)  # type: ignore[arg-type]
    if function is not exit_early:
        assert isinstance(error.value, LimitExceeded)
        assert "crashed, or needed more than 1 GB of memory" in str(error.value)


def test_a_system_without_a_bound_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If setrlimit refuses to limit memory, as on macOS, the function runs without a limit."""
    (tmp_path / "resource.py").write_text(
        "RLIMIT_CORE, RLIMIT_CPU, RLIMIT_AS = range(3)\n"
        "def setrlimit(which, bounds):\n    if which == RLIMIT_AS:\n        raise ValueError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run_bounded(math.gcd, 12, 18, seconds=20, memory=MEMORY) == 6


def test_arguments_are_values_of_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_bounded(add, object(), 2, seconds=20, memory=MEMORY)


def test_the_current_folder_brings_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run_bounded(add, 1, 2, seconds=20, memory=MEMORY) == {"sum": 3}
    assert not (tmp_path / "ran").exists()
