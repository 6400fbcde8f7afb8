"""Train students from a store: batches in the student's tokens, alignment, losses, the loop.

A name is imported when it is first used; `__init__.pyi` lists the names. To run only the training
loop, call `teachonce.train`, which is `teachonce.student_train.train.train`.
"""

from teachonce.support.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
