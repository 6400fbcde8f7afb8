"""The front door: every public name of the packages, and nothing else.

    from teachonce import TrainOptions, open_store, train

A name's package is imported when the name is first used, so that `import teachonce` is fast and
loads neither torch nor transformers. `__init__.pyi` lists the names.
"""

from importlib.metadata import version

from teachonce.support.lazy_exports import lazy_exports

__version__ = version("teachonce")
__getattr__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")


def __dir__() -> list[str]:
    return __all__
