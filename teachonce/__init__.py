"""The front door: every public name of the packages, and nothing else.

    from teachonce import TrainOptions, open_store, train

A name's package is imported when the name is first used, so that `import teachonce` is fast and
loads neither torch nor transformers. `__init__.pyi` lists the names, for type checkers and for the
code below.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

_HOMES = {  # None: a module of this package
    name.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("teachonce")
    if name not in _HOMES:
        raise AttributeError(f"module 'teachonce' has no attribute {name!r}")
    home = _HOMES[name]
    found = getattr(import_module(home), name) if home else import_module(f"{__name__}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
