"""Import libraries of an optional extra of pyproject.toml. If one is missing, the error names the
command that installs it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from teachonce.support.errors import UserError, first_line


def library(name: str, extra: str, what_for: str) -> Any:
    """Import a module of an optional library.

    what_for: the option or command that needs the library, such as `--task retrieval`. Raises
    UserError, with the command that installs the library, if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _lacking(name, extra, what_for, first_line(error)) from None


def check_library(name: str, extra: str, what_for: str) -> None:
    """Raise UserError as `library` does if a module is not installed; nothing is imported."""
    if importlib.util.find_spec(name) is None:
        raise _lacking(name, extra, what_for, f"No module named {name!r}")


def _lacking(name: str, extra: str, what_for: str, why: str) -> UserError:
    package = name.partition(".")[0].replace("_", "-")
    return UserError(
        f"{what_for} needs {package}, which cannot be imported ({why});"
        f" `pip install 'teachonce[{extra}]'`"
    )
