"""Train a student with transformers.Trainer: python examples/transformers_trainer.py STORE OUT

The trained model is the distiller: the student and its projections to the teacher's width.
"""

import sys
from typing import Any

from teachonce import StudentBatch, StudentBatches, TrainOptions, open_store, prepare
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments


class DistillingTrainer(Trainer):
    """A Trainer that takes complete batches, and the weighted losses of the distiller."""

    def get_train_dataloader(self) -> Any:
        # batch_size None: the dataset yields batches, which must not be collated again.
        return DataLoader(self.train_dataset, batch_size=None, collate_fn=named)  # type: ignore[arg-type]

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        losses = model(inputs["batch"].to(self.args.device))
        loss: torch.Tensor = self.model.weighted(losses)  # type: ignore[operator, union-attr]
        return loss


class SetEpoch(TrainerCallback):
    """Sets the epoch of the batches, on which their order and masks depend."""

    def __init__(self, batches: StudentBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches.set_epoch(int(state.epoch))


def named(batch: StudentBatch) -> dict[str, StudentBatch]:
    """Wrap a batch in a dictionary, the form in which Trainer handles inputs."""
    return {"batch": batch}


def train(store_path: str, out: str, vocab: str = "5k", epochs: int = 3) -> list[float]:
    store = open_store(store_path)
    losses = {"mlm": 1.0, "hidden": 30.0}
    batches = StudentBatches(store, vocab, loss=losses, batch_tokens=4096)
    # The same initial student as in student-train, with weights taken from the teacher.
    options = TrainOptions(store_path, vocab=vocab, student="64x2x2", loss=losses)
    student = prepare(options.resolved(), store)[0]
    arguments = TrainingArguments(
        out, num_train_epochs=epochs, learning_rate=options.resolved_lr, save_strategy="no",
        logging_steps=1, report_to="none",
    )  # fmt: skip
    trainer = DistillingTrainer(
        batches.distiller(student), arguments, train_dataset=batches,
        callbacks=[SetEpoch(batches)],
    )  # fmt: skip
    trainer.train()
    student.save_pretrained(out)
    batches.tokenizer.save_pretrained(out)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train(sys.argv[1], sys.argv[2])
