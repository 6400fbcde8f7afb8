"""Trains a student on stores: steps and stages, losses of a store, validation."""

from teachonce.support.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
