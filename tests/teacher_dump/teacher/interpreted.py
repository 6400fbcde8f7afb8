"""The fused head, run by Triton's interpreter on a CPU, against float64.

TRITON_INTERPRET=1 python -m tests.teacher_dump.teacher.interpreted
"""

import torch
from torch import nn

from teachonce.teacher_dump.teacher import fused_head, heads

CASES = (  # fewest programs, rows, width, vocabulary, k, type, whether there is a bias
    (1, 3, 24, 37, 1, torch.float32, True),
    (8, 70, 33, 301, 5, torch.float32, False),
    (2, 3, 70, 290, 33, torch.bfloat16, True),
    (1, 5, 40, 200, 64, torch.bfloat16, False),
)


def check(
    programs: int, rows: int, width: int, vocabulary: int, k: int, dtype: torch.dtype, shifted: bool
) -> None:
    """Raise AssertionError if the error of the kernel is larger than float32 rounding."""
    fused_head.PROGRAMS = programs
    weight = torch.randn(vocabulary, width).to(dtype)
    states = (3 * torch.randn(rows, width)).to(dtype)
    bias = torch.randn(vocabulary) if shifted else torch.zeros(vocabulary)
    exact = nn.functional.linear(states.double(), weight.double(), bias.double())
    ids, best, left = fused_head.best_logits(weight, bias, states, k)
    wanted = exact.topk(k, dim=1).values
    torch.testing.assert_close(best.double(), wanted, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(exact.gather(1, ids.long()), wanted, rtol=1e-5, atol=2e-4)
    assert all(len(set(row)) == k for row in ids.tolist())
    others = exact.scatter(1, ids.long(), -torch.inf) - wanted[:, :1]
    torch.testing.assert_close(left.double(), others.exp().sum(1), rtol=1e-3, atol=1e-12)


def check_agreement() -> None:
    """Check that `heads` gets the same values from the kernel as from the logits themselves."""
    decoder = heads.Decoder.of(torch.randn(150, 32).bfloat16(), torch.randn(150))
    for values in (torch.randn(5, 32).bfloat16(), torch.randn(5, 32)):
        (ours,) = heads.fused_logits(decoder, values, 7)
        (wanted,) = heads.chunked_logits(decoder, values, 7)
        torch.testing.assert_close(ours[0].long(), wanted[0])
        torch.testing.assert_close(ours[1:], wanted[1:])


def check_nan() -> None:
    """Check that NaN is reported, so that the sequence is run again. NaN must not reach the search
    for the best values: lanes of a GPU would disagree on the maximum, and wait without end."""
    fused_head.PROGRAMS = 1
    states, weight, bias = torch.randn(3, 16), torch.randn(300, 16), torch.zeros(300)
    finite = (states @ weight.T)[:, torch.arange(300) != 137]
    weight[137] = torch.nan
    _, best, left = fused_head.best_logits(weight, bias, states, 4)
    assert left.isnan().all()
    torch.testing.assert_close(best, finite.topk(4, dim=1).values)
    states[1], weight[137] = torch.nan, 0.0
    _, best, left = fused_head.best_logits(weight, bias, states, 4)
    assert left.isnan().tolist() == [False, True, False] and best[[0, 2]].isfinite().all()


def main() -> None:
    torch.manual_seed(0)
    for case in CASES:
        check(*case)
    check_agreement()
    check_nan()
    fused_head.PROGRAMS = 2  # the self-test has fewer rows
    assert heads.has_fused_kernel(5, torch.device("cpu"))
    print("sound")


if __name__ == "__main__":
    main()
