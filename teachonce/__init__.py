"""The public API: every public name of the packages.

    from teachonce import TrainOptions, open_store, train

A name's package is imported when the name is first used. So `import teachonce` is fast, and loads
neither torch nor transformers. `__init__.pyi` lists the names.
"""

from typing import Any

from teachonce.support.lazy_exports import lazy_exports

_exported, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _exported(name)
    from importlib.metadata import version  # 0.02 s of CPU, a fifth of a --help

    return version("teachonce")
