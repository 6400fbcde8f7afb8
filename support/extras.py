"""Imports libraries that an extra of pyproject.toml brings, and tells how to get a missing one."""

from __future__ import annotations

import importlib
from typing import Any

from support.errors import UserError, first_line


def library(name: str, extra: str, what_for: str) -> Any:
    """Import a module of a library that not everyone has.

    Raises UserError, in one line with the command that installs it, where it cannot be imported.
    `what_for` says who needs it: `--task retrieval`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(
            f"{what_for} needs {package}, which cannot be imported ({first_line(error)});"
            f" `pip install 'teachonce[{extra}]'`"
        ) from None
