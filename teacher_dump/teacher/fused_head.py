"""Finds the top logits of a head and the summed probability of all others in one Triton kernel,
without an [N,V] array in memory.

Runs on GPUs, and needs triton, which CUDA builds of torch install. `heads.top_logits` chooses when
to use it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST = 128  # top logits per row: they stay in registers
ROWS, COLUMNS = 64, 128  # tile of a program: rows of states, and pieces of the vocabulary
PROGRAMS = 256  # at least, to fill a GPU: if rows are few, programs share the vocabulary


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    states, weight, bias, best_out, ids_out, highest_out, mass_out, n, vocabulary, width, share,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    end = tl.minimum((part + 1) * share, vocabulary)
    slots, columns = tl.arange(0, K)[None, :], tl.arange(0, COLUMNS)
    best = tl.full((ROWS, K), float("-inf"), tl.float32)
    ids = tl.zeros((ROWS, K), tl.int32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for begin in range(part * share, end, COLUMNS):
        pieces = begin + columns
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        for inner in range(0, width, INNER):
            channels = inner + tl.arange(0, INNER)
            # int64: a vocabulary times its width may exceed 2^31 elements.
            x = tl.load(
                states + rows[:, None].to(tl.int64) * width + channels[None, :],
                mask=(rows[:, None] < n) & (channels[None, :] < width), other=0.0,
            )  # fmt: skip
            w = tl.load(
                weight + pieces[None, :].to(tl.int64) * width + channels[:, None],
                mask=(pieces[None, :] < end) & (channels[:, None] < width), other=0.0,
            )  # fmt: skip
            if WIDE:
                x, w = x.to(tl.float32), w.to(tl.float32)
            # By default Triton rounds float32 factors to TF32.
            logits = tl.dot(x, w, logits, input_precision="ieee")
        # Columns behind the share get -inf: they are never chosen, and add no mass.
        logits += tl.load(bias + pieces, mask=pieces < end, other=float("-inf"))[None, :]
        # Comparisons with NaN are false, so the top logits cannot show it: only the mass does.
        odd = logits != logits
        poison = tl.sum(tl.where(odd, 1.0, 0.0), 1)
        logits = tl.where(odd, float("-inf"), logits)
        # While a logit exceeds the lowest of the top K, the two swap places: the old one is added
        # to the others' mass with the rest of the tile. After the first tiles swaps are rare.
        top, index = tl.max(logits, 1, return_indices=True)
        lowest, slot = tl.min(best, 1, return_indices=True)
        while tl.max((top > lowest).to(tl.int32), 0) > 0:
            enters = (top > lowest)[:, None]
            slot_mask = enters & (slots == slot[:, None])
            best = tl.where(slot_mask, top[:, None], best)
            ids = tl.where(slot_mask, (begin + index)[:, None], ids)
            column_mask = enters & (columns[None, :] == index[:, None])
            logits = tl.where(column_mask, lowest[:, None], logits)
            top, index = tl.max(logits, 1, return_indices=True)
            lowest, slot = tl.min(best, 1, return_indices=True)
        # Online softmax (Milakov and Gimelshein 2018): the sum is rescaled to the new highest.
        rising = tl.maximum(highest, tl.max(best, 1))
        mass = mass * tl.exp(highest - rising) + tl.sum(tl.exp(logits - rising[:, None]), 1)
        mass = tl.where(poison > 0, float("nan"), mass)
        highest = rising
    out = rows.to(tl.int64) * tl.num_programs(1) + part
    tl.store(best_out + out[:, None] * K + slots, best, mask=rows[:, None] < n)
    tl.store(ids_out + out[:, None] * K + slots, ids, mask=rows[:, None] < n)
    tl.store(highest_out + out, highest, mask=rows < n)
    tl.store(mass_out + out, mass, mask=rows < n)


def best_logits(
    weight: torch.Tensor, bias: torch.Tensor, states: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the k highest logits of states [N,D] @ weight [V,D].T + bias [V].

    Returns ids [N,k] and float32 logits [N,k], highest first, and the sum [N] of exp(logit -
    highest logit) over all other logits. States and weight are both float32 or both bfloat16; sums
    are float32. Results are exact up to rounding; between equal logits the choice is arbitrary. A
    row with a NaN logit has a NaN sum.
    """
    n, width = states.shape
    # Triton's ranges have a power of 2 as their length.
    vocabulary, slots = len(weight), max(16, triton.next_power_of_2(k))
    blocks = triton.cdiv(n, ROWS)
    tiles = triton.cdiv(vocabulary, COLUMNS)
    tiles_each = triton.cdiv(tiles, min(tiles, triton.cdiv(PROGRAMS, blocks)))
    parts = triton.cdiv(tiles, tiles_each)
    best = states.new_empty((n, parts, slots), dtype=torch.float32)
    ids = states.new_empty((n, parts, slots), dtype=torch.int32)
    highest, mass = (states.new_empty((n, parts), dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(states):
        _kernel[(blocks, parts)](
            states.contiguous(), weight.contiguous(), bias, best, ids, highest, mass,
            n, vocabulary, width, tiles_each * COLUMNS,
            K=slots, ROWS=ROWS, COLUMNS=COLUMNS, INNER=32 if weight.itemsize == 4 else 64,
            # The interpreter of the tests takes bfloat16 for integers.
            WIDE=not isinstance(_kernel, triton.JITFunction), num_warps=8,
        )  # fmt: skip
    ordered, order = best.flatten(1).sort(dim=1, descending=True)
    top = ordered[:, :1]
    # Logits in the slots of programs that are not among the best k count as others.
    rest = (mass * (highest - top).exp()).sum(1) + (ordered[:, k:] - top).exp().sum(1)
    return ids.flatten(1).gather(1, order[:, :k]), ordered[:, :k], rest
