"""The one loop: fine-tune a checkpoint for a task with the transformers Trainer, over seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments, set_seed

from downstream.encoders import default_lr, load_with_fresh_head, longest_input
from downstream.progress import Progress
from downstream.tasks import Task
from store.console import counted
from store.errors import UserError
from teacher_dump.models import ResolvedModel, resolve_model

Say = Callable[[str], object]


@dataclass(frozen=True)
class FineTuneSettings:
    """How a checkpoint is fine-tuned. The best epoch is chosen on dev."""

    epochs: int = 3
    batch_size: int = 16
    lr: float | None = None  # that of `default_lr`
    max_length: int | None = None  # that of the task; cut to what the model takes
    seeds: int = 3
    seed: int = 0
    limit: int | None = None  # training examples, the first ones


def fine_tune(
    task: Task,
    model: str,
    files: Mapping[str, Path],
    settings: FineTuneSettings,
    say: Say = print,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Fine-tune once for each seed; scores on dev, and on test where it is given.

    The model of the first seed is saved in the folder `keep`, where one is given.

    `files` has `train`, `dev` and perhaps `test`. Returns `{"task", "model", "measures", "primary",
    "files", "settings", "examples": {split: number}, "seeds": [{"seed", "lr", "best_epoch", "dev",
    "test"}], "mean": {split: score}, "deviation": ...}`. A score has a figure for each measure of
    the task, and that which chose the epoch as `primary`, too. The deviation is the sample one (0
    for a single seed). `say` is told a line for each epoch.

    Raises UserError on a wrong model or file, and where a training does not stay finite.
    """
    source = resolve_model(model)
    splits = {name: task.read(path) for name, path in files.items()}
    splits["train"] = splits["train"][: settings.limit]
    task.prepare(splits)
    seeds = range(settings.seed, settings.seed + settings.seeds)
    runs = [
        _one_seed(task, source, splits, settings, seed, say, keep if seed == seeds[0] else None)
        for seed in seeds
    ]
    counts = {name: len(rows) for name, rows in splits.items()}
    counts["train"] = len(task.sample(splits["train"], settings.seed))
    scored = [split for split in ("dev", "test") if split in splits]
    return {
        "task": task.name,
        "model": model,
        "measures": dict(task.measures),
        "primary": task.primary,
        "files": {name: str(path) for name, path in files.items()},
        "settings": {**asdict(settings), **task.options()},
        "examples": counts,
        "seeds": runs,
        "mean": {split: _over_seeds(runs, split, np.mean) for split in scored},
        "deviation": {split: _over_seeds(runs, split, _deviation) for split in scored},
    }


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _over_seeds(runs: Sequence[dict[str, Any]], split: str, reduce: Any) -> dict[str, float]:
    return {name: float(reduce([run[split][name] for run in runs])) for name in runs[0][split]}


def _one_seed(
    task: Task,
    source: ResolvedModel,
    splits: Mapping[str, Sequence[Any]],
    settings: FineTuneSettings,
    seed: int,
    say: Say,
    keep: Path | None,
) -> dict[str, Any]:
    set_seed(seed)
    tokenizer, model = load_with_fresh_head(source, task.model_class, task.head())
    lr = settings.lr or default_lr(model)
    asked = settings.max_length or task.max_length
    length = min(asked, longest_input(model.config, tokenizer))
    cut = f", {length} tokens at most (the model takes no more)" if length < asked else ""
    examples = {**splits, "train": task.sample(splits["train"], seed)}
    say(f"seed {seed}: learning rate {lr:g}, {counted(model.num_parameters(), 'parameter')}{cut}")
    rows = {name: task.encode(tokenizer, some, length) for name, some in examples.items()}

    def score(split: str, predictions: Any) -> dict[str, float]:
        found = task.score(examples[split], rows[split], _finite(predictions, lr))
        return {"primary": found[task.primary], **found}

    with tempfile.TemporaryDirectory(prefix="fine-tune-") as scratch:
        trainer = Trainer(
            model=model,
            args=_arguments(scratch, settings, lr, seed),
            train_dataset=rows["train"],
            eval_dataset=rows["dev"],
            data_collator=task.collator(tokenizer),
            compute_metrics=lambda output: score("dev", output.predictions),
        )
        told = {heading: f"eval_{name}" for heading, name in task.measures.items()}
        Progress(say, {"held-out loss": "eval_loss", **told}, f"seed {seed}, ").follow(trainer)
        trainer.train()
        curve = [row["eval_primary"] for row in trainer.state.log_history if "eval_primary" in row]
        result: dict[str, Any] = {"seed": seed, "lr": lr, "best_epoch": 1 + int(np.argmax(curve))}
        trainer.compute_metrics = None  # that of dev, where `predict` would score every split by it
        for split in splits.keys() & {"dev", "test"}:
            predictions = trainer.predict(rows[split]).predictions  # type: ignore[arg-type]
            result[split] = score(split, predictions)
        if keep is not None:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(keep)
            tokenizer.save_pretrained(keep)
    say(f"seed {seed}: best after epoch {result['best_epoch']}")
    return result


def _finite(predictions: Any, lr: float) -> Any:
    parts = predictions if isinstance(predictions, tuple) else (predictions,)
    if not all(np.isfinite(part).all() for part in parts):
        raise UserError(f"the model predicts NaN or infinity after training at {lr:g}; lower --lr")
    return predictions


def _arguments(folder: str, settings: FineTuneSettings, lr: float, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=lr,
        warmup_steps=0.1,
        weight_decay=0.01,
        seed=seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        disable_tqdm=True,  # `Progress` does it
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_primary",
        greater_is_better=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
