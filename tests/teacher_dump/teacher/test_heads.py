"""Values read from the logits equal a float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from teachonce.teacher_dump.teacher import heads
from teachonce.teacher_dump.teacher.heads import Decoder, log_partitions, top_logits
from tests.end_to_end.support import ROOT


def head_and_values(dtype: torch.dtype, seed: int, scale: float) -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(seed)
    decoder = Decoder.of(torch.randn(700, 24, dtype=dtype), torch.randn(700, dtype=dtype))
    return decoder, (scale * torch.randn(53, 24)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 8.0]), chunk=st.integers(1, 60)
)
def test_the_kept_logits(dtype: torch.dtype, seed: int, scale: float, chunk: int) -> None:
    decoder, values = head_and_values(dtype, seed, scale)
    exact = nn.functional.linear(values.double(), decoder.weight.double(), decoder.bias.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "CHUNK_ELEMENTS", 700 * chunk)
        ids, logprobs, rest, log_partition = top_logits(decoder, values, 5).values()
        assert np.abs(log_partitions(decoder, values) - log_partition).max() < 1e-4
    logp = exact.log_softmax(-1)
    assert np.abs(log_partition - exact.logsumexp(-1).numpy()).max() < 1e-4
    kept = logp.gather(1, torch.from_numpy(ids).long())
    assert np.abs(logprobs - kept.numpy()).max() < 1e-4  # whichever of two equal values it is
    assert np.abs(logprobs - logp.topk(5).values.numpy()).max() < 1e-4
    left = logp.scatter(1, torch.from_numpy(ids).long(), -torch.inf).logsumexp(-1).numpy()
    assert np.abs(np.exp(rest) - np.exp(left)).max() < 1e-5


def test_full_products_where_a_factor_has_more_bits() -> None:
    """Float32 states with a bfloat16 head (a bfloat16 teacher run again) use full products."""
    decoder, _ = head_and_values(torch.bfloat16, 0, 1.0)
    values = 8 * torch.randn(53, 24)
    exact = nn.functional.linear(values.double(), decoder.weight.double(), decoder.bias.double())
    assert decoder.rounded
    assert np.abs(log_partitions(decoder, values) - exact.logsumexp(-1).numpy()).max() < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_fused_kernel() -> None:
    """The fused kernel agrees with float64, in its own process: Triton fixes its mode at import."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.teacher_dump.teacher.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "sound\n", done.stderr


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_head = pytest.importorskip("teachonce.teacher_dump.teacher.fused_head")
    monkeypatch.setattr(fused_head, "PROGRAMS", 2)
    has_fused_kernel, cpu = heads.has_fused_kernel.__wrapped__, torch.device("cpu")
    assert not has_fused_kernel(5, cpu)

    def kernel(change: Callable[..., Any]) -> Callable[..., Any]:
        def best_logits(weight: Any, bias: Any, states: Any, k: int) -> Any:
            (found,) = heads.chunked_logits(Decoder(weight.float(), bias, True), states, k)
            return change(*found)

        return best_logits

    for change, sound in (
        (lambda ids, best, left: (ids, best, left), True),
        (lambda ids, best, left: (ids.roll(1, 0), best, left), False),
        (lambda ids, best, left: (ids[:, :1].expand_as(ids), best, left), False),
        (lambda ids, best, left: (ids, best + 0.1, left), False),
        (lambda ids, best, left: (ids, best, 0.9 * left), False),
    ):
        monkeypatch.setattr(fused_head, "best_logits", kernel(change))
        assert has_fused_kernel(5, cpu) == sound
    monkeypatch.setattr(fused_head, "best_logits", kernel(lambda *found: found))
    assert has_fused_kernel(fused_head.MOST, cpu) and not has_fused_kernel(fused_head.MOST + 1, cpu)
