"""Matthews' correlation of gold and predicted labels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def matthews(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return Matthews' correlation of labels [G], 0 if all gold or all predicted labels are equal.

    Matthews 1975; for several labels Gorodkin 2004.
    """
    # Imported here: scikit-learn takes a second or two, and only models of a task need it.
    from sklearn.metrics import matthews_corrcoef

    gold, predicted = np.asarray(gold), np.asarray(predicted)
    if len(np.unique(np.concatenate([gold, predicted]))) < 2:  # scikit-learn warns
        return 0.0
    return float(matthews_corrcoef(gold, predicted))
