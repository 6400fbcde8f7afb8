"""A loss and a kind of student that a package of your own adds to teachonce:

    pip install ./examples/own_package
    student-train --store STORE --loss mlm=1,huber=30 --student distilbert:64x2x2

Without an installation, with this folder on PYTHONPATH: `--loss teachonce_own:HUBER=30`,
`--student teachonce_own:DISTILBERT:64x2x2`. This module imports no torch, so that mistakes are
reported at once; models are in a module of their own.
"""

from typing import Any

from teachonce.student_train.losses.registry import Loss
from teachonce.student_train.settings.shapes import Shape, ShapeKind


def huber(student: Any, teacher: Any) -> Any:
    """Huber loss of projected student states [G,D] and the teacher's, mean over G and D."""
    from torch.nn import functional

    if len(student) == 0:
        return student.sum() * 0.0
    return functional.smooth_l1_loss(student.float(), teacher)


def read(kind: str, size: str) -> Shape:
    """Read width x layers x heads. Raises ValueError for anything else."""
    try:
        width, layers, heads = map(int, size.split("x"))
    except ValueError:
        raise ValueError("expected HxLxA, such as 64x2x2") from None
    return Shape(kind, width, layers, heads, width, 4 * width)


HUBER = Loss(
    "huber",
    huber,
    teacher="normalised",
    student="runs",
    unit="Huber losses of a channel",
    projection="always",
)
DISTILBERT = ShapeKind(
    read,
    positions="learnt",
    rate=lambda shape: 1e-3,
    models="teachonce_own_models:DISTILBERT",
)
