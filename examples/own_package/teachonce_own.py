"""Add a loss and a kind of student to teachonce in your own package:

    pip install ./examples/own_package
    student-train --store STORE --loss mlm=1,huber=30 --student distilbert:64x2x2

Without installing it, put this folder on PYTHONPATH: `--loss teachonce_own:HUBER=30`,
`--student teachonce_own:DISTILBERT:64x2x2`. This module does not import torch, so that mistakes in
the command line are reported at once; the models are in `teachonce_own_models.py`.
"""

from typing import Any

from teachonce.losses import Loss
from teachonce.student_train.settings.shapes import Shape, ShapeKind


def huber(student: Any, teacher: Any) -> Any:
    """Compute the Huber loss of projected student states and teacher states [G,D]: the mean."""
    from torch.nn import functional

    return functional.smooth_l1_loss(student.float(), teacher)


def read(kind: str, size: str) -> Shape:
    """Parse HxLxA: hidden size, layers, attention heads. Raises ValueError for anything else."""
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
