"""The transformers Trainer for masked LMs: a cheap head, a fixed validation, pure masks."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, Trainer


class BatchMasking(DataCollatorForLanguageModeling):
    """Masks 80/10/10 as a pure function of (seed, the batch's ids).

    With one generator for the whole run, a resumed run would begin its draws anew and mask other
    tokens.
    """

    def __init__(self, tokenizer: Any, mask_prob: float, seed: int) -> None:
        super().__init__(tokenizer=tokenizer, mlm_probability=mask_prob)
        self.base = seed

    def torch_call(self, examples: Any) -> dict[str, Any]:
        """`input_ids` and `labels` [B, S]; -100 where nothing is asked."""
        ids = np.asarray([example["input_ids"] for example in examples], np.int32)
        seed = zlib.crc32(ids.tobytes(), self.base)
        self.generator = torch.Generator().manual_seed(seed)
        return dict(super().torch_call(examples))


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The blocks [n, S] as a dataset of `input_ids`."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index].tolist()}


def masked_batches(
    collator: BatchMasking, rows: Any, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Batches masked once, so that every validation of a run asks the same questions."""
    examples = [{"input_ids": row.tolist()} for row in rows]
    return [
        dict(collator(examples[first : first + batch_size]))
        for first in range(0, len(examples), batch_size)
    ]


class MlmTrainer(Trainer):
    """A Trainer that computes the head at masked positions only and validates on fixed masks.

    Six sevenths of the positions have no label, and with a large vocabulary the head costs more
    than the encoder. The loss is the same mean over labelled tokens.
    """

    def __init__(self, *, fixed_dev: list[dict[str, torch.Tensor]], **kwargs: Any) -> None:
        super().__init__(eval_dataset=fixed_dev, **kwargs)
        self.fixed_dev = fixed_dev

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The dev batches, masked once before training."""
        return DataLoader(self.fixed_dev, batch_size=None)  # type: ignore[arg-type]

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Mean cross-entropy in nats over the tokens whose label is not -100."""
        labels = inputs["labels"].view(-1)
        chosen = labels.ne(-100).nonzero().squeeze(1)
        body = self.accelerator.unwrap_model(model).base_model
        handle = body.register_forward_hook(lambda _module, _args, output: _only(output, chosen))
        try:
            features = {name: value for name, value in inputs.items() if name != "labels"}
            logits = model(**features).logits[0]
        finally:
            handle.remove()
        total = torch.nn.functional.cross_entropy(logits.float(), labels[chosen], reduction="sum")
        loss = total / max(1, len(chosen))
        return (loss, {"loss": loss}) if return_outputs else loss


def _only(output: Any, chosen: torch.Tensor) -> Any:
    """The encoder's output with its states [B, S, D] cut to the chosen flat rows, [1, M, D]."""
    states = output.last_hidden_state
    output["last_hidden_state"] = states.flatten(0, 1).index_select(0, chosen).unsqueeze(0)
    return output
