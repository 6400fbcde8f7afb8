"""The teacher's distribution in the student's vocabulary: no mass is lost, no piece comes twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.student_train.data.targets import fold
from tests.student_train.kept_logits import V_STUDENT, V_TEACHER, kept_logits


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 20))
def test_folding_keeps_all_mass_and_names_each_piece_once(seed: int, k: int) -> None:
    vocabulary = np.random.default_rng(seed).integers(-1, V_STUDENT, V_TEACHER)
    ids, logprobs, rest, log_partition = kept_logits(seed, k)
    targets, some = fold(ids, logprobs, rest, log_partition, vocabulary)
    assert some.tolist() == (vocabulary[ids] >= 0).any(1).tolist()
    kept = torch.where(targets.valid, targets.logprobs.exp(), 0).sum(1)
    torch.testing.assert_close(
        kept + targets.rest.exp(), torch.ones(int(some.sum())), atol=1e-5, rtol=0
    )
    for row, g in enumerate(np.flatnonzero(some)):
        valid = targets.valid[row]
        pieces = targets.ids[row][valid].tolist()
        assert len(set(pieces)) == len(pieces)
        for piece, logprob in zip(pieces, targets.logprobs[row][valid].tolist(), strict=True):
            want = np.exp(logprobs[g][vocabulary[ids[g]] == piece]).sum()
            assert np.exp(logprob) == pytest.approx(want, rel=1e-4)
