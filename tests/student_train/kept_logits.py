"""A teacher's stored logits, for tests of targets and losses."""

import numpy as np

from teachonce.support.arrays import Array

G, V_TEACHER, V_STUDENT = 6, 40, 12


def teacher_logits(seed: int) -> Array:
    """Logits [G, V_TEACHER] of a teacher."""
    return np.random.default_rng(seed).normal(0, 3, (G, V_TEACHER))


def kept_logits(seed: int, k: int) -> tuple[Array, Array, Array, Array]:
    """Return the `k` best logits as in a store: ids and log-probabilities [G, k], log of the
    probability of all others [G], log-partitions [G]."""
    logits = teacher_logits(seed)
    log_partition = np.log(np.exp(logits).sum(1))
    ids = np.argsort(-logits, axis=1)[:, :k]
    logprobs = np.take_along_axis(logits, ids, 1) - log_partition[:, None]
    rest = np.log(np.maximum(0, 1 - np.exp(logprobs).sum(1)))
    return ids, logprobs, rest, log_partition.astype(np.float32)
