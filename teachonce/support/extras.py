"""Imports libraries that an extra of pyproject.toml brings, and tells how to get a missing one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from teachonce.support.errors import UserError, first_line


def library(name: str, extra: str, what_for: str) -> Any:
    """Import a module of a library that not everyone has.

    Raises UserError, in one line with the command that installs it, where it cannot be imported.
    `what_for` says who needs it: `--task retrieval`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _lacking(name, extra, what_for, first_line(error)) from None


def check_library(name: str, extra: str, what_for: str) -> None:
    """Raise UserError as `library` does where a module is not installed; nothing is imported."""
    if importlib.util.find_spec(name) is None:
        raise _lacking(name, extra, what_for, f"No module named {name!r}")


def _lacking(name: str, extra: str, what_for: str, why: str) -> UserError:
    package = name.partition(".")[0].replace("_", "-")
    return UserError(
        f"{what_for} needs {package}, which cannot be imported ({why});"
        f" `pip install 'teachonce[{extra}]'`"
    )
