"""Batches of similar texts: random batches teach little about texts that are near one another."""

from __future__ import annotations

import numpy as np

from teachonce.support.arrays import Array, Floats

TOGETHER = 16  # similar texts that stay together; a batch has several such groups


def similar_batches(vectors: Floats, members: Array, size: int, *key: int) -> list[Array]:
    """Cut `members` int64 [n], rows of `vectors` [N,W], into batches of `size`, the last perhaps
    smaller: a pure function of the arguments.

    The texts are halved, and halved again, by which of two random members of a half each is nearer
    to, until few are left: these groups of similar texts are then shuffled. Other numbers of `key`
    give other groups.
    """
    chance = np.random.default_rng([*key, 5])
    groups, open_ = list[Array](), [np.arange(len(members))]
    own = np.asarray(vectors[members], np.float32)
    while open_:
        group = open_.pop()
        if len(group) <= min(TOGETHER, size):
            groups.append(group)
            continue
        one, other = chance.choice(group, 2, replace=False)
        nearer = own[group] @ (own[one] - own[other])
        order = group[np.argsort(nearer, kind="stable")]
        open_ += [order[: len(order) // 2], order[len(order) // 2 :]]
    shuffled = np.concatenate([groups[i] for i in chance.permutation(len(groups))])
    return [members[shuffled[i : i + size]] for i in range(0, len(shuffled), size)]
