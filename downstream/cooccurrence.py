"""Word embeddings from counts of neighbours: a start for a model that has seen nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 4


def embeddings(rows: npt.NDArray[np.int32], vocabulary: int, width: int) -> npt.NDArray[Any]:
    """[V, D] float32 of unit variance a row, from the blocks [n, S] of token ids.

    Positive pointwise mutual information of tokens at most WINDOW apart, factorised (Levy & Goldberg
    2014, equations 3 and 8): U sqrt(S) of its truncated SVD. A token without neighbours gets zeros.
    """
    from scipy import sparse
    from sklearn.utils.extmath import randomized_svd

    counts = sparse.csr_array((vocabulary, vocabulary), dtype=np.float32)
    for apart in range(1, WINDOW + 1):
        left, right = rows[:, :-apart].ravel(), rows[:, apart:].ravel()
        ones = np.ones(len(left), np.float32)
        counts += sparse.csr_array((ones, (left, right)), shape=counts.shape)
    counts = (counts + counts.T).tocoo()
    own = counts.sum(1)
    row, column = counts.coords
    information = np.log(counts.data * own.sum() / (own[row] * own[column]))
    kept = information > 0
    positive = sparse.csr_array(
        (information[kept].astype(np.float32), (row[kept], column[kept])), shape=counts.shape
    )
    left_vectors, values, _ = randomized_svd(positive, width, n_iter=3, random_state=0)
    vectors = left_vectors * np.sqrt(values)
    deviation = vectors.std(1, keepdims=True)
    unit = (vectors - vectors.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    return np.asarray(unit, np.float32)


def log_frequencies(rows: npt.NDArray[np.int32], vocabulary: int) -> npt.NDArray[Any]:
    """[V] float32: log of each token's smoothed share of the blocks, the best guess without a context."""
    counts = np.bincount(rows.ravel(), minlength=vocabulary) + 1.0
    return np.log(counts / counts.sum()).astype(np.float32)
