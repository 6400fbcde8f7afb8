# The public names and where each is defined. This list is the only one: __init__.py reads it.

from teachonce.student_train.train.student_training import Trained as Trained
from teachonce.student_train.train.student_training import train as train

__all__: list[str]
