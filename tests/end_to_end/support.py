"""Helpers of the end-to-end tests: commands as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
Word = str | Path | int | float
"""What a command line is made of, before it is text."""
Words = tuple[Word, ...]
STUDENT = ("--student", "32x2x4", "--batch-tokens", "512", "--device", "cpu")


def invoke(command: click.Command, *words: Word) -> Result:
    """Run the command with these words in this process; raise any error but an orderly exit."""
    result = CliRunner().invoke(command, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def ok(command: click.Command, *words: Word) -> str:
    """Run a command that must succeed, and return its output."""
    result = invoke(command, *words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(command: click.Command, *words: Word) -> str:
    """Run a command that must fail, and return its single error line."""
    result = invoke(command, *words)
    assert result.exit_code in (1, 2), result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    return lines[0]


def says(line: str, *words: str) -> None:
    """Check that the line contains all these words."""
    for word in words:
        assert word in line, line


def report_of(student: Path) -> dict[str, Any]:
    """Return the record of a training."""
    found: dict[str, Any] = json.loads((student / "training.json").read_text("utf-8"))
    return found


def start(module: str, *words: Word) -> subprocess.Popen[str]:
    """Run the `main` of a module in a separate process: one thread, no network, errors piped."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", f"from {module} import main; main()", *map(str, words)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder, by its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
