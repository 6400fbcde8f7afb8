"""The losses, grouped by what they compare: `losses.states.cosine`, `losses.logits.kl`,
`losses.task.ce`.

Each is a pure function of the student's side, the teacher's side and, if needed, a temperature or a
mask of pairs. Its docstring has formula, shapes, normaliser and source.
"""

from teachonce.student_train.losses import logits, maps, next_token, states, task, vectors
from teachonce.student_train.losses.loss import Loss

__all__ = ["Loss", "logits", "maps", "next_token", "states", "task", "vectors"]
