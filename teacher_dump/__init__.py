"""Run a teacher over a corpus and store its output: corpus, windows, forward passes, store.

A name is imported when it is first used; `__init__.pyi` lists the names.
"""

from teachonce.support.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
