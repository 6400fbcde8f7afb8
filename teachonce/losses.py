"""The losses by what they compare: `losses.states.cosine`, `losses.logits.kl`, `losses.task.ce`.

Each is a pure function of the student's side, the teacher's, and where needed a temperature or
which pairs are present; its docstring says formula, shapes, normaliser and source.
"""

from teachonce.student_train.losses import logits, maps, next_token, states, task, vectors
from teachonce.student_train.losses.registry import Loss

__all__ = ["Loss", "logits", "maps", "next_token", "states", "task", "vectors"]
