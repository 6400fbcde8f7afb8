"""The feature store: a teacher's features of every token, in chunked arrays. See FORMAT.md.

A name is imported when it is first used; `__init__.pyi` lists the names.
"""

from teachonce.support.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
