"""Processes of one training (torchrun, `accelerate launch`): they divide the batches of each step,
and sum their gradients."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from teachonce.support.console import counted
from teachonce.support.differences import differences
from teachonce.support.environment import check_torchrun, torchrun_number
from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.support.packages import installed


@dataclass(frozen=True)
class Ranks:
    """Connects this process, number `rank`, with the `size` processes of a training. All processes
    must call the methods in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Return whether this process prints and writes: it has rank 0."""
        return self.rank == 0

    def check(self, accumulate: int) -> None:
        """Raise UserError if a step has fewer batches than there are processes."""
        if self.size > accumulate:
            raise UserError(
                f"--accumulate {accumulate} and {self.size} processes: a step needs at least one"
                f" batch per process; give --accumulate {self.size} (and smaller batches), or start"
                f" {counted(accumulate, 'process')}"
            )

    def check_installed(self) -> None:
        """Raise UserError if a process has other versions or other code than the first process."""
        local = installed()
        first = self.broadcast(local)
        changes = [
            f"{name} is {now}, and in the first process {then}"
            for name, then, now in differences(first, local)
        ]
        message = f"{socket.gethostname()}: {'; '.join(changes)}"
        messages: list[Any] = [None] * self.size
        with _peer_errors():
            # Every process takes part, also without a difference, so that all end with one message.
            distributed.all_gather_object(messages, message if changes else None)
        if unlike := next(filter(None, messages), None):
            raise UserError(
                f"the processes of this training have different software: on {unlike}; install the"
                " same everywhere"
            )

    def owns(self, batch: int) -> bool:
        """Return whether this process reads the batch of this number."""
        return batch % self.size == self.rank

    def first_from(self, batch: int) -> int:
        """Return the number of the first batch that this process reads, starting with `batch`."""
        return batch + (self.rank - batch) % self.size

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum numbers by name over all processes; a missing name counts as 0."""
        if self.size == 1:
            return dict(values)
        by_rank: list[Any] = [None] * self.size
        with _peer_errors():
            distributed.all_gather_object(by_rank, dict(values))
        names = dict.fromkeys(name for numbers in by_rank for name in numbers)
        # Added in the order of the ranks, so that each process gets the same bits.
        return {name: sum(numbers.get(name, 0.0) for numbers in by_rank) for name in names}

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any process is set."""
        return self.summed({"": float(flag)})[""] > 0

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process; it must be picklable."""
        if self.size == 1:
            return value
        values = [value]
        with _peer_errors():
            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, own: Tensor, begin: int, rows: int) -> Tensor:
        """Join the rows of all processes to a tensor [rows,...], the same in each process.

        own: this process's rows, which begin at row `begin`. rows: the number of all rows. Every
        process must compute the same loss from the result and divide it by `size`; then
        `sum_gradients` gives the gradient that a single process has.
        """
        gathered: Tensor = _Gather.apply(own, begin, rows, self.size)  # type: ignore[no-untyped-call]
        return gathered

    def sum_gradients(self, model: nn.Module) -> None:
        """Replace each gradient by its sum over all processes, bit for bit the same in each
        process.

        A weight that has no gradient in any process remains without one.
        """
        if self.size == 1:
            return
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not weights:
            return
        device = weights[0].device
        present = [weight.grad is not None for weight in weights]
        # A weight may have a gradient in some processes only, and all must sum the same weights.
        somewhere = torch.tensor(present, dtype=torch.int32, device=device)
        with _peer_errors():
            distributed.all_reduce(somewhere, distributed.ReduceOp.MAX)
        used = [weight for weight, has in zip(weights, somewhere.tolist(), strict=True) if has]
        # One call for all weights: a call for each would wait for the network each time.
        flat = torch.cat([
            (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten()
            for weight in used
        ])  # fmt: skip
        with _peer_errors():
            distributed.all_reduce(flat)
        parts = flat.split([weight.numel() for weight in used])
        for weight, part in zip(used, parts, strict=True):
            weight.grad = part.view_as(weight)


class _Gather(torch.autograd.Function):
    """Joins rows of all processes; see `Ranks.gather`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, begin: int, rows: int, size: int) -> Tensor:
        ctx.begin, ctx.rows, ctx.size = begin, len(own), size
        # A sum over zeros, because shares differ in length, and all_gather needs equal ones.
        gathered = own.new_zeros(rows, *own.shape[1:])
        gathered[begin : begin + len(own)] = own
        with _peer_errors():
            distributed.all_reduce(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Without a call to the other processes: they compute the same loss from the same rows.
        gradient = gradients[0].narrow(0, ctx.begin, ctx.rows)
        return gradient * ctx.size, None, None, None


ALONE = Ranks()


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Raise UserError if another process has ended; errors of exhausted memory pass."""
    # torch raises RuntimeError for a lost process, ValueError for a missing variable of torchrun.
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise UserError(
            "another process of this training has ended, or cannot be reached"
            f" ({first_line(error)[:120]}); read that process's error message"
        ) from error


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the other processes of this training until the end of the `with` block.

    The environment variables of torchrun describe them; without these variables the process is
    alone. Raises UserError if the others cannot be reached, or have other versions, and if a
    variable is not a number.
    """
    check_torchrun()
    if torchrun_number("WORLD_SIZE", 1) <= 1:
        yield ALONE
        return
    with _peer_errors():
        gpu = device.startswith("cuda")
        # torch gathers objects by the backend of the CPU if there is one, and gradients by the
        # GPU's.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    try:
        ranks = Ranks(distributed.get_rank(), distributed.get_world_size())
        ranks.check_installed()
        yield ranks
    finally:
        distributed.destroy_process_group()
