"""A transformers Trainer for masked LMs: it computes the head at masked positions only, and its
masks are repeatable."""

from __future__ import annotations

import math
import time
import zlib
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    TrainerCallback,
    TrainingArguments,
)

from teachonce.downstream.trainer import WarmupTrainer
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.ranks import ALONE, Ranks


class BatchMasking(DataCollatorForLanguageModeling):
    """Masks tokens 80/10/10 (Devlin et al. 2019). The masks depend only on the seed and on the
    token ids of the batch."""

    def __init__(self, tokenizer: Any, mask_prob: float, seed: int) -> None:
        super().__init__(tokenizer=tokenizer, mlm_probability=mask_prob)
        self.base = seed

    def torch_call(self, examples: Any) -> dict[str, Any]:
        """Return `input_ids` and `labels`, [B, S]; a label is -100 where no token is masked."""
        # One generator for the whole run would mask other tokens in a resumed run.
        ids = np.asarray([example["input_ids"] for example in examples], np.int32)
        seed = zlib.crc32(ids.tobytes(), self.base)
        self.generator = torch.Generator().manual_seed(seed)
        return dict(super().torch_call(examples))


def on_one_device(arguments: TrainingArguments) -> TrainingArguments:
    """Prevent the Trainer from using DataParallel, which gives each GPU a share of a batch:
    `MlmTrainer` chooses positions of the whole batch."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


class BlockDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Provides blocks of token ids [n, S] as a dataset of `input_ids`."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index].tolist()}


class MaskedBatches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Provides blocks [n, S] as a dataset of masked batches. A batch has the same masks each time
    it is read, so that all validations of a run predict the same tokens."""

    def __init__(self, collator: BatchMasking, rows: Array, batch_size: int) -> None:
        self.collator, self.rows, self.batch_size = collator, rows, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        first = number * self.batch_size
        rows = self.rows[first : first + self.batch_size]
        return dict(self.collator([{"input_ids": row.tolist()} for row in rows]))


class MlmTrainer(WarmupTrainer):
    """Computes the head at masked positions only, and validates on fixed masks.

    The loss is the mean over the labelled tokens of all processes (`ranks`) together.
    """

    def __init__(self, *, fixed_dev: MaskedBatches, ranks: Ranks = ALONE, **kwargs: Any) -> None:
        super().__init__(eval_dataset=fixed_dev, **kwargs)
        self.fixed_dev, self.ranks = fixed_dev, ranks
        self._validated: list[tuple[float, int]] = []  # loss sum and label count of each batch

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the dev batches, whose masks are fixed."""
        # With the default generator, each validation would change the draws of dropout.
        return DataLoader(self.fixed_dev, batch_size=None, generator=torch.Generator())

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Validate; the loss is the mean over all labelled tokens. Raises UserError if no token is
        labelled."""
        self._validated.clear()
        output = super().evaluation_loop(*arguments, **named)
        count = sum(tokens for _, tokens in self._validated)
        if not count:
            raise UserError(
                "the held-out text is so short that no token is masked; add text to it (--dev)"
            )
        # The Trainer averages over batches: a shorter last batch would count as much as the others.
        metrics: Any = output.metrics
        (name,) = (key for key in metrics if key.endswith("_loss"))
        metrics[name] = sum(total for total, _ in self._validated) / count
        return output

    def training_step(self, model: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        """Sum the gradients of all processes. The mean of the returned losses over the processes is
        the loss of the whole batch."""
        # DistributedDataParallel would take the mean of the gradients, not their sum.
        assert not isinstance(model, DistributedDataParallel)
        loss = super().training_step(model, *arguments, **named)
        self.ranks.sum_gradients(model)
        return loss * self.ranks.size

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the mean cross-entropy in nats over the tokens whose label is not -100.

        In training, the sum over this process's tokens is divided by the count over all processes.
        """
        # Six sevenths of the positions have no label, and with a large vocabulary the head costs
        # more than the encoder: so the head is computed at labelled positions only.
        labels = inputs["labels"].view(-1)
        scored = labels.ne(-100).nonzero().squeeze(1)
        body = self.accelerator.unwrap_model(model).base_model
        # A hook serves every family, whatever its head is called.
        handle = body.register_forward_hook(lambda _module, _args, output: _select(output, scored))
        try:
            features = {name: value for name, value in inputs.items() if name != "labels"}
            logits = model(**features).logits[0]
        finally:
            handle.remove()
        total = torch.nn.functional.cross_entropy(logits.float(), labels[scored], reduction="sum")
        count = len(scored)
        # Every process validates on all batches, so counts are summed over processes in training
        # only.
        if model.training:
            count = int(self.ranks.summed({"": count})[""])
        else:
            self._validated.append((float(total), count))
        loss = total / max(1, count)
        return (loss, {"loss": loss}) if return_outputs else loss


def _select(output: Any, positions: torch.Tensor) -> Any:
    """Reduce the hidden states of an output, [B, S, D], to `positions`, [1, M, D]."""
    states = output.last_hidden_state
    output["last_hidden_state"] = states.flatten(0, 1).index_select(0, positions).unsqueeze(0)
    return output


class StepsOfThisRun(TrainerCallback):
    """Makes a resumed run validate and save at its own intervals, not at the intervals that its
    checkpoint has recorded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


class TrainingMinutes(TrainerCallback):
    """Counts the minutes of a training, including the time before a checkpoint that it resumes."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def spent(self) -> float:
        return (time.perf_counter() - self.started) / 60

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.log_history:
            self.started -= 60 * state.log_history[-1].get("minutes", 0)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Checkpoints contain the log, so that a resumed training finds the minutes there.
        state.log_history[-1]["minutes"] = self.spent()
