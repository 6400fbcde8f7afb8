"""Takes from a head what is kept: the K best log-probabilities, random draws, or its input.

Logits of a whole vocabulary are never kept; logits of a task's few labels are kept all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, out_of_memory

CHUNK_ELEMENTS = 1 << 23  # logits that exist at once: 32 MB in float32, whatever the batch


@dataclass(frozen=True)
class Decoder:
    """The last step of an LM head: logits [N,V] = values [N,D] @ weight.T + bias."""

    weight: torch.Tensor  # float32 [V,D]
    bias: torch.Tensor  # float32 [V]
    rounded: bool = False  # the weights are bfloat16 numbers

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Decoder:
        """Make a float32 decoder of any weights: bfloat16 logits are a tenth of a nat off."""
        wide = weight.detach().float()
        shift = wide.new_zeros(len(wide)) if bias is None else bias.detach().float()
        return cls(wide, shift, weight.dtype == torch.bfloat16)

    def to(self, device: str) -> Decoder:
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    @cached_property
    def narrow(self) -> torch.Tensor:
        """The weight in bfloat16; where it is `rounded` nothing is lost."""
        return self.weight.bfloat16()

    def logits(self, values: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a few rows of `values` [N,D] at a time, as a slice, and their float32 logits."""
        rows = max(1, CHUNK_ELEMENTS // self.weight.shape[0])
        rounded = self.rounds(values)
        for begin in range(0, len(values), rows):
            part = slice(begin, begin + rows)
            with _products_of_bfloat16() if rounded else nullcontext():
                logits = nn.functional.linear(values[part].float(), self.weight, self.bias)
            yield part, logits

    def rounds(self, values: torch.Tensor) -> bool:
        """Whether the weights and `values` are bfloat16 numbers."""
        return self.rounded and values.dtype == torch.bfloat16


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    """Let float32 matrix products round their factors to bfloat16, where that is faster.

    Factors that are bfloat16 numbers lose nothing by it: sums and results stay float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def split_decoder(model: PreTrainedModel, vocabulary: int) -> Decoder:
    """Take the decoder off a model with a head over a `vocabulary` (of tokens, classes or tags).

    Afterwards the model's `logits` are the decoder's input. Raises UserError if the model has no
    linear decoder with so many outputs.
    """
    found = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.out_features == vocabulary
    ]
    if found:
        name, linear = found[-1]
        _replace(model, name, nn.Identity())
        return Decoder.of(linear.weight, linear.bias)
    # DeBERTa multiplies by the embeddings, without a decoder of its own.
    for name, module in model.named_modules():
        bias = getattr(module, "bias", None)
        over_pieces = isinstance(bias, nn.Parameter) and bias.shape == (vocabulary,)
        if over_pieces and hasattr(module, "LayerNorm"):
            _replace(model, name, _WithoutDecoder(module))
            embeddings: Any = model.get_input_embeddings()
            return Decoder.of(embeddings.weight, bias)
    raise UserError(
        f"{type(model).__name__} has no linear layer with {vocabulary} outputs: use --head none"
    )


class _WithoutDecoder(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.steps = nn.Sequential(head.dense, head.transform_act_fn, head.LayerNorm)

    def forward(self, hidden: torch.Tensor, _embeddings: nn.Module) -> torch.Tensor:
        output: torch.Tensor = self.steps(hidden)
        return output


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def top_logits(decoder: Decoder, values: torch.Tensor, k: int) -> tuple[Array, Array, Array, Array]:
    """Keep the k best logits of each row of `values` [N,D].

    Returns ids int32 [N,K] and log-probabilities [N,K], best first, the log of the mass left over
    [N], and the log-partition [N].
    """
    kept: list[tuple[torch.Tensor, ...]] = []
    # For bfloat16 numbers only: in float32 the kernel was never timed against cuBLAS.
    fused = values.is_cuda and decoder.rounds(values) and fuses(k, values.device)
    best_of = fused_logits if fused else chunked_logits
    for ids, best, left in best_of(decoder, values, k):
        highest = best[:, :1]
        total = (best - highest).double().exp_().sum(-1) + left
        log_total = total.log().float()
        rest = left.log() - log_total
        kept.append(
            (ids.int(), best - highest - log_total[:, None], rest, highest[:, 0] + log_total)
        )
    joined = [torch.cat(part).cpu().numpy() for part in zip(*kept, strict=True)]
    return joined[0], joined[1], joined[2], joined[3]


Best = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""For some rows at a time: ids [N,K] and logits [N,K], best first; and of all other logits the sum
of exp(logit - best) [N]."""


def chunked_logits(decoder: Decoder, values: torch.Tensor, k: int) -> Best:
    """Compute the logits of a few rows of `values` [N,D] at a time, and keep the k best."""
    for _, logits in decoder.logits(values):
        best, ids = logits.topk(k, dim=-1)
        # The best are left out of the sum, not subtracted: a sure teacher's rest would be lost.
        yield ids, best, logits.scatter_(1, ids, -torch.inf).sub_(best[:, :1]).exp_().sum(-1)


def fused_logits(decoder: Decoder, values: torch.Tensor, k: int) -> Best:
    """Give the results of `chunked_logits` by one kernel, for k up to `fused_head.MOST`."""
    from teachonce.teacher_dump.teacher import fused_head

    if decoder.rounds(values):
        yield fused_head.best_logits(decoder.narrow, decoder.bias, values, k)
    else:
        yield fused_head.best_logits(decoder.weight, decoder.bias, values.float(), k)


@cache
def fuses(k: int, device: torch.device) -> bool:
    """Whether the kernel of `fused_head` works for k logits on a device.

    Triton may be missing, or the compiler that it calls, or the room for so many logits.
    """
    try:
        from teachonce.teacher_dump.teacher import fused_head

        # Neither width fills a tile; rows of 192 are aligned and read faster than rows of 130.
        return k <= fused_head.MOST and all(_kernel_agrees(k, device, w) for w in (130, 192))
    except Exception as error:  # whatever compilers and drivers raise
        if out_of_memory(error):  # then a smaller batch is tried
            raise
        return False


def _kernel_agrees(k: int, device: torch.device, width: int) -> bool:
    """Whether the kernel agrees with `chunked_logits` on random bfloat16 numbers.

    There are so many rows that a program has several tiles of the vocabulary.
    """
    from teachonce.teacher_dump.teacher import fused_head

    random = torch.Generator(device).manual_seed(0)
    rows = fused_head.PROGRAMS // 2 * fused_head.ROWS + 1
    values, weight = (
        torch.randn(n, width, generator=random, device=device).bfloat16() for n in (rows, 300)
    )
    decoder = Decoder.of(weight, torch.randn(300, generator=random, device=device))
    (ids, best, left), wanted = (
        [torch.cat(some) for some in zip(*way(decoder, values, k), strict=True)]
        for way in (fused_logits, chunked_logits)
    )
    logits = torch.cat([some for _, some in decoder.logits(values)])
    # Rounding decides which of two nearly equal logits comes first: ids are not compared.
    both = (best, logits.gather(1, ids.long()))
    once = (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    right = all(torch.allclose(one, wanted[1], rtol=1e-4, atol=2e-3) for one in both)
    return bool(once) and right and torch.allclose(left, wanted[2], rtol=0.02, atol=1e-12)


def sampled_logits(decoder: Decoder, values: torch.Tensor, uniform: Array) -> tuple[Array, Array]:
    """Draw token ids from the teacher's distribution, by inverse transform of `uniform` [N,draws].

    Returns the ids [N,draws] and the log-partition [N]. Counts of draws are an unbiased estimate of
    the probabilities (random-sampling distillation, ACL 2025).
    """
    draws: list[torch.Tensor] = []
    partitions: list[torch.Tensor] = []
    for rows, logits in decoder.logits(values):
        log_partition = logits.logsumexp(-1)
        cumulative = (logits - log_partition[:, None]).double().exp_().cumsum(-1)
        chance = torch.from_numpy(uniform[rows]).to(cumulative) * cumulative[:, -1:]
        draws.append(
            torch.searchsorted(cumulative, chance, right=True).clamp_(max=logits.shape[-1] - 1)
        )
        partitions.append(log_partition)
    return torch.cat(draws).cpu().numpy(), torch.cat(partitions).cpu().numpy()


def all_logits(decoder: Decoder, values: torch.Tensor) -> Array:
    """Compute all logits [N,C] of `values` [N,D], for heads over a few classes or tags."""
    return torch.cat([logits for _, logits in decoder.logits(values)]).cpu().numpy()


def log_partitions(decoder: Decoder, values: torch.Tensor) -> Array:
    """Compute the log of the summed exp of all logits, [N], of `values` [N,D]."""
    return torch.cat([logits.logsumexp(-1) for _, logits in decoder.logits(values)]).cpu().numpy()
