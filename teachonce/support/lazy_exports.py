"""Public names of a package that are imported when they are first used.

A command's --help must not wait for imports that only its work needs. The stub `__init__.pyi` is
the only list of the names, for type checkers and for `lazy_exports`:

    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from teachonce.support.environment import passive_waits


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    The stub next to it has only lines such as `from a.b import c as c`, and `from . import d as d`
    for a module of the package itself. `__getattr__` raises AttributeError for any other name. It
    imports inside `passive_waits`, as some names import torch.
    """
    statements = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8")).body
    homes = {
        name.name: statement.module
        for statement in statements
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }

    def imported(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        with passive_waits():
            module = import_module(home or f"{package}.{name}")
        value = getattr(module, name) if home else module
        # Python calls `__getattr__` for missing names alone, so the next use costs nothing.
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(homes)
    return imported, lambda: names, names
