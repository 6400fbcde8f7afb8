"""Measures of predicted labels. scikit-learn and seqeval are imported late: they take a second or
two, and only models of a task need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def matthews(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return Matthews' correlation of labels [G], 0 if all gold or all predicted labels are equal.

    Matthews 1975; for several labels Gorodkin 2004.
    """
    from sklearn.metrics import matthews_corrcoef

    gold, predicted = np.asarray(gold), np.asarray(predicted)
    if len(np.unique(np.concatenate([gold, predicted]))) < 2:  # scikit-learn warns
        return 0.0
    return float(matthews_corrcoef(gold, predicted))


def macro_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean of the F1 of each gold label."""
    from sklearn.metrics import f1_score

    # Without `labels`, a label that is only predicted would count as one more, with an F1 of 0.
    # `zero_division`: a label that is never predicted has an F1 of 0, without a warning.
    labels = sorted(set(gold))
    return float(f1_score(gold, predicted, labels=labels, average="macro", zero_division=0))


def macro_entity_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """Return the mean of the F1 of whole entities of each gold type, 0 without gold entities.

    gold, predicted: the IOB tags of each sentence.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    # seqeval's own mean also counts types that are only predicted.
    *_, f1, counts = precision_recall_fscore_support(gold, predicted, average=None, zero_division=0)
    return float(f1[counts > 0].mean()) if any(counts) else 0.0
