"""Extracts from a head what a store holds: the top K log-probabilities, random draws, or its input.

Logits over a whole vocabulary are never stored; all logits over the few labels of a task are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, out_of_memory

CHUNK_ELEMENTS = 1 << 23  # logits in memory at once: 32 MB in float32, for any batch size


@dataclass(frozen=True)
class Decoder:
    """Computes the last layer of a head: logits z [N,V] = values [N,D] @ weight.T + bias, where
    `values` are the inputs of the layer. With a `cap`, the logits are cap * tanh(z / cap)."""

    weight: torch.Tensor  # float32 [V,D]
    bias: torch.Tensor  # float32 [V]
    rounded: bool = False  # whether bfloat16 can represent the weights exactly
    cap: float | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Decoder:
        """Create a float32 decoder from weights of any precision."""
        # Logits in bfloat16 would be off by a tenth of a nat.
        wide = weight.detach().float()
        shift = wide.new_zeros(len(wide)) if bias is None else bias.detach().float()
        return cls(wide, shift, weight.dtype == torch.bfloat16)

    @cached_property
    def narrow(self) -> torch.Tensor:
        """Return the weight in bfloat16. This is exact if it is `rounded`."""
        return self.weight.bfloat16()

    def logits(self, values: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the rows of the inputs `values` [N,D], with their float32 logits."""
        rows = max(1, CHUNK_ELEMENTS // self.weight.shape[0])
        rounded = self.rounds(values)
        for begin in range(0, len(values), rows):
            part = slice(begin, begin + rows)
            with _products_of_bfloat16() if rounded else nullcontext():
                logits = nn.functional.linear(values[part].float(), self.weight, self.bias)
            yield part, self._capped(logits)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def logits_of(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logit of one id for each of the inputs `values` [N,D]: float32 [N] for the
        ids `ids` [N]."""
        # Chunks bound the memory of the gathered weights [rows, D].
        rows = max(1, CHUNK_ELEMENTS // self.weight.shape[1])
        parts = zip(values.split(rows), ids.split(rows), strict=True)
        chunks = [(v.float() * self.weight[i]).sum(-1) + self.bias[i] for v, i in parts]
        return self._capped(torch.cat(chunks))

    def rounds(self, values: torch.Tensor) -> bool:
        """Return whether bfloat16 represents the weights and the inputs `values` exactly."""
        return self.rounded and values.dtype == torch.bfloat16


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    """Let float32 matrix products round their factors to bfloat16, which is faster on a GPU.

    The products are exact if the factors are bfloat16 numbers: sums and results stay float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def split_decoder(model: PreTrainedModel, vocabulary: int) -> Decoder:
    """Remove the decoder from a model whose head has `vocabulary` outputs (tokens, classes, tags),
    and return it.

    Afterwards the model's `logits` are the decoder's input. Raises UserError if the model has no
    linear decoder with this number of outputs.
    """
    linears = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.out_features == vocabulary
    ]
    if linears:
        # The last one: a layer inside may have the same number of outputs by chance.
        name, linear = linears[-1]
        _set_module(model, name, _Undecoded(linear.weight))
        return Decoder.of(linear.weight, linear.bias)
    # DeBERTa's head has no decoder: it multiplies by the input embeddings.
    for name, module in model.named_modules():
        bias = getattr(module, "bias", None)
        over_pieces = isinstance(bias, nn.Parameter) and bias.shape == (vocabulary,)
        if over_pieces and hasattr(module, "LayerNorm"):
            _set_module(model, name, _WithoutDecoder(module))
            embeddings: Any = model.get_input_embeddings()
            return Decoder.of(embeddings.weight, bias)
    raise UserError(
        f"{type(model).__name__} has no linear layer with {vocabulary} outputs: use --head none"
    )


class _Undecoded(nn.Module):
    """Returns its input, in the place of a decoder. Mamba reads the precision of its weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().new_empty(0), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class _WithoutDecoder(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.steps = nn.Sequential(head.dense, head.transform_act_fn, head.LayerNorm)

    def forward(self, hidden: torch.Tensor, _embeddings: nn.Module) -> torch.Tensor:
        output: torch.Tensor = self.steps(hidden)
        return output


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def top_logits(decoder: Decoder, values: torch.Tensor, k: int) -> dict[str, Array]:
    """Compute the top k log-probabilities of each of the decoder's inputs `values` [N,D].

    Returns `ids` int32 [N,K] and `logprobs` [N,K], highest first, `rest` [N], the log of the
    remaining probability, and `log_partition` [N].
    """
    chunks: list[tuple[torch.Tensor, ...]] = []
    # For bfloat16 numbers only: in float32 the kernel was never timed against cuBLAS.
    plain = decoder.rounds(values) and decoder.cap is None
    fused = values.is_cuda and plain and has_fused_kernel(k, values.device)
    best_of = fused_logits if fused else chunked_logits
    for ids, best, mass in best_of(decoder, values, k):
        highest = best[:, :1]
        # Relative to the highest logit, as `mass` is, so that no exponential overflows.
        total = (best - highest).double().exp_().sum(-1) + mass
        log_total = total.log().float()
        rest = mass.log() - log_total
        chunks.append(
            (ids.int(), best - highest - log_total[:, None], rest, highest[:, 0] + log_total)
        )
    columns = zip(
        ("ids", "logprobs", "rest", "log_partition"), zip(*chunks, strict=True), strict=True
    )
    return {name: torch.cat(column).cpu().numpy() for name, column in columns}


TopLogits = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""For a chunk of rows at a time: ids [N,K] and logits [N,K], highest first, and the sum [N] of
exp(logit - highest) over all other logits."""


def chunked_logits(decoder: Decoder, values: torch.Tensor, k: int) -> TopLogits:
    """Compute the logits of the decoder's inputs `values` [N,D] in chunks of rows, and yield the
    top k of each chunk and the rest, as in `TopLogits`."""
    for _, logits in decoder.logits(values):
        best, ids = logits.topk(k, dim=-1)
        # The top logits are excluded from the sum, not subtracted from the total: if they have
        # nearly all of the probability, the difference would be rounding error.
        yield ids, best, logits.scatter_(1, ids, -torch.inf).sub_(best[:, :1]).exp_().sum(-1)


def fused_logits(decoder: Decoder, values: torch.Tensor, k: int) -> TopLogits:
    """Compute the same as `chunked_logits` in one kernel, for k up to `fused_head.MOST`."""
    from teachonce.teacher_dump.teacher import fused_head

    if decoder.rounds(values):
        yield fused_head.best_logits(decoder.narrow, decoder.bias, values, k)
    else:
        yield fused_head.best_logits(decoder.weight, decoder.bias, values.float(), k)


@cache
def has_fused_kernel(k: int, device: torch.device) -> bool:
    """Return whether the kernel of `fused_head` works for k logits on a device."""
    try:
        from teachonce.teacher_dump.teacher import fused_head

        # Neither width fills a tile; rows of 192 are aligned and read faster than rows of 130.
        return k <= fused_head.MOST and all(_kernel_agrees(k, device, w) for w in (130, 192))
    except Exception as error:  # Triton, its compiler or the driver may be missing or too old
        if out_of_memory(error):  # then a smaller batch is tried
            raise
        return False


def _kernel_agrees(k: int, device: torch.device, width: int) -> bool:
    """Return whether the kernel agrees with `chunked_logits` on random bfloat16 numbers."""
    from teachonce.teacher_dump.teacher import fused_head

    random = torch.Generator(device).manual_seed(0)
    # Enough rows that a program computes several tiles of the vocabulary.
    rows = fused_head.PROGRAMS // 2 * fused_head.ROWS + 1
    values, weight = (
        torch.randn(n, width, generator=random, device=device).bfloat16() for n in (rows, 300)
    )
    decoder = Decoder.of(weight, torch.randn(300, generator=random, device=device))
    (ids, best, mass), expected = (
        [torch.cat(column) for column in zip(*best_of(decoder, values, k), strict=True)]
        for best_of in (fused_logits, chunked_logits)
    )
    logits = torch.cat([chunk for _, chunk in decoder.logits(values)])
    # Rounding decides which of two nearly equal logits comes first: ids are not compared.
    tops = (best, logits.gather(1, ids.long()))
    distinct = (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    close = all(torch.allclose(top, expected[1], rtol=1e-4, atol=2e-3) for top in tops)
    return bool(distinct) and close and torch.allclose(mass, expected[2], rtol=0.02, atol=1e-12)


def sampled_logits(decoder: Decoder, values: torch.Tensor, uniform: Array) -> dict[str, Array]:
    """Draw token ids from the teacher's distribution by inverse transform of `uniform` [N,draws].

    Returns the ids, `draws` [N,draws], and `log_partition` [N]. Counts of draws estimate the
    probabilities without bias (random-sampling distillation, ACL 2025).
    """
    draws: list[torch.Tensor] = []
    partitions: list[torch.Tensor] = []
    for rows, logits in decoder.logits(values):
        log_partition = logits.logsumexp(-1)
        # In float32 a sum near 1 would not grow by a probability below 3e-8.
        cumulative = (logits - log_partition[:, None]).double().exp_().cumsum(-1)
        # By rounding, the sum of all probabilities is not quite 1.
        chance = torch.from_numpy(uniform[rows]).to(cumulative) * cumulative[:, -1:]
        # If `chance` rounds up to the whole sum, the id would be behind the last.
        draws.append(
            torch.searchsorted(cumulative, chance, right=True).clamp_(max=logits.shape[-1] - 1)
        )
        partitions.append(log_partition)
    columns = {"draws": draws, "log_partition": partitions}
    return {name: torch.cat(chunks).cpu().numpy() for name, chunks in columns.items()}


def observed_logprobs(
    decoder: Decoder, values: torch.Tensor, following: Array, log_partition: Array
) -> Array:
    """Compute the log-probability [N] of the token that follows each of the N tokens.

    values: [N,D], the decoder's inputs. following: int [N], the ids of the following tokens.
    log_partition: float32 [N], see `log_partitions`.
    """
    ids = torch.from_numpy(following.astype(np.int64)).to(values.device)
    logprobs = decoder.logits_of(values, ids).cpu().numpy() - log_partition
    # Both numbers are rounded, so that their difference may be above 0.
    return np.asarray(np.minimum(logprobs, 0))


def all_logits(decoder: Decoder, values: torch.Tensor) -> Array:
    """Compute all logits [N,C] of the decoder's inputs `values` [N,D], for heads over a few classes
    or tags."""
    return torch.cat([logits for _, logits in decoder.logits(values)]).cpu().numpy()


def log_partitions(decoder: Decoder, values: torch.Tensor) -> Array:
    """Compute the logsumexp [N] of all logits of the decoder's inputs `values` [N,D]."""
    return torch.cat([logits.logsumexp(-1) for _, logits in decoder.logits(values)]).cpu().numpy()
