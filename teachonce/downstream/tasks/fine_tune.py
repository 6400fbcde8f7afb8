"""Fine-tunes a checkpoint over seeds, or scores it without training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from teachonce.checkpoints.bilstm import BiLstmConfig
from teachonce.checkpoints.checkpoint_tokenizer import note_on_pieces, save_tokenizer
from teachonce.checkpoints.loading import declared_task, input_limit, load_tokenizer
from teachonce.checkpoints.names import ResolvedModel, resolve_model
from teachonce.downstream.progress import COUNTED, TrainingProgress
from teachonce.downstream.score_tables import SHARES, result_of
from teachonce.downstream.settings import FineTuneSettings, seeds_from
from teachonce.downstream.tasks.example_warnings import (
    Say,
    say_shared,
    say_uncomputable,
    warn_if_constant,
)
from teachonce.downstream.tasks.model_card import write_card
from teachonce.downstream.tasks.task_interface import Task
from teachonce.downstream.trainer import (
    NO_TRACKERS,
    TrackedRun,
    TrackerSettings,
    WarmupTrainer,
    folder_of,
)
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.files import apply_umask, atomic_path
from teachonce.support.signals import stoppable
from teachonce.training.optimizer import ADADELTA_LR, optimizer_of
from teachonce.training.trackers import RunDescription

# BERT's weight decay and betas (Devlin et al. 2019, A.2).
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)
SMALL_WIDTH = 384
DAMAGED = "; its weights are damaged, train it again"
Outputs = tuple[str, Sequence[dict[str, Any]], Any]
"""The name of a split, the rows of its examples, and what is predicted for them."""
UNSAVED = "fine-tuning saves nothing before its end; the same command starts from the beginning"


def fine_tune(
    task: Task,
    model: str,
    files: Mapping[str, Path],
    settings: FineTuneSettings,
    say: Say = print,
    save_to: Path | None = None,
    log: TrackerSettings = NO_TRACKERS,
) -> dict[str, Any]:
    """Fine-tune once for each seed; score on dev and, if given, on test.

    files: `train`, `dev` and the files of `splits_to_test`.
    say: prints a line for each epoch.
    save_to: the folder of the first seed's model, which the result lists in `saved`.
    log: the trackers of each seed's training.

    Returns `{"task", "model", "measures", "primary", "scale", "files", "settings", "examples":
    {split: number}, "seeds": [{"seed", "lr", "best_epoch", "dev", "test"}], "mean": {split: score},
    "deviation": ...}`. A score has a figure for each measure of the task; `primary` is the figure
    that chooses the epoch. Tables print figures times `scale`. With several test files, `test` is
    the mean over them. `deviation` is the sample standard deviation over the seeds, 0 for a single
    seed. A seed whose predictions are all equal, unlike the gold answers, has a `warning`; a seed
    whose model is saved may have a `note` for the users of the model.

    Raises UserError for a wrong model or file, and if the predictions become NaN or infinite.
    """
    seeds = seeds_from(settings.seed, settings.seeds)
    source = resolve_model(model)
    splits = {name: task.read(path) for name, path in files.items()}
    for line in task.take_notes():
        say(line)
    # Before `prepare`, which takes the labels from the examples that are trained on.
    splits["train"] = splits["train"][: settings.limit]
    task.prepare(splits)
    say_uncomputable(task, files, splits, say)
    say_shared(task, files, splits, say)
    if note := note_on_pieces(load_tokenizer(source), task.texts(splits["train"])):
        say(note)
    about = {"task": task.name, "model": model, **asdict(settings), **task.options()}
    used = {**splits, "train": task.sample(splits["train"], settings.seed)}
    # If a later seed fails or the disk is full, no folder is left that would take --out.
    with atomic_path(save_to) if save_to else nullcontext() as new:
        runs = []
        for seed in seeds:
            folder = folder_of(log.out, seed, settings.seeds)
            facts = RunDescription(folder, about | {"seed": seed}, "scores.json", resumable=False)
            tracked_run = TrackedRun(log.names, facts, False, say, [*task.measures.values()])
            one, first = replace(settings, seed=seed), new if seed == seeds[0] else None
            with stoppable(lambda: UNSAVED), tracked_run as tracked:
                runs.append(_one_seed(task, source, splits, one, say, first, tracked))
        result = _result(task, model, files, asdict(settings), used, runs)
        if new is None:
            return result
        write_card(result, new)
    if "note" in runs[0]:
        say(f"{save_to}: {runs[0]['note']}")
    return {**result, "saved": [str(save_to)]}


def score_as_is(
    task: Task,
    model: str,
    files: Mapping[str, Path],
    max_length: int | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Score a model, which has a head for the task, without training it.

    files: from `splits_to_test`.

    Labels of model and file are matched by name. Texts are truncated to `max_length` tokens, by
    default the task's. Returns the same dictionary as `fine_tune`, for one run without a seed. Its
    settings are `as_is`, `max_length` and the task's own.

    Raises UserError for a wrong model or file, if the model has no head for the task, and if the
    file has a label that the model does not have, unless the task counts such labels.
    """
    splits = {name: task.read(path) for name, path in files.items()}
    for line in task.take_notes():
        say(line)
    settings = {"as_is": True, "max_length": max_length}
    say_uncomputable(task, files, splits, say)
    if own := task.predict_own(model, splits, max_length):
        for line in ("as is, with the modules of its folder", *task.take_notes()):
            say(line)
        outputs: Iterable[Outputs] = ((name, (), values) for name, values in own.items())
    else:
        outputs = _outputs_of_head(task, model, splits, max_length, say)
    scores, answers = _scored(task, splits, outputs, DAMAGED)
    remedy = "train it with a higher --lr or more --epochs"
    run = scores | warn_if_constant(task, splits, answers, remedy, say)
    return _result(task, model, files, settings, splits, [run])


def _outputs_of_head(
    task: Task,
    model: str,
    splits: Mapping[str, Sequence[Any]],
    max_length: int | None,
    say: Say,
) -> Iterator[Outputs]:
    """Yield what the model's own head for the task predicts for each split."""
    source = resolve_model(model)
    if early := declared_task(source, task.model_class):
        task.adopt(early, splits)  # a label that the model lacks is refused before it is loaded
    tokenizer, network, spec = task.load_own(source)
    task.adopt(spec, splits)
    length, cut = _length(task, max_length, network, tokenizer)
    say(f"as is: {counted(network.num_parameters(), 'parameter')}{cut}")
    # A Trainer creates its output folder even where nothing is saved.
    with tempfile.TemporaryDirectory(prefix="score-") as scratch:
        trainer = Trainer(
            model=network,
            args=TrainingArguments(**_scoring(scratch)),
            data_collator=task.collator(tokenizer),
        )
        trainer.remove_callback(PrinterCallback)
        for name, examples in splits.items():
            rows = _encoded(task, name, (tokenizer, length), examples, say)
            yield name, rows, _predict(trainer, rows)


def _scored(
    task: Task, splits: Mapping[str, Sequence[Any]], outputs: Iterable[Outputs], blame: str
) -> tuple[dict[str, dict[str, float]], set[Any]]:
    """Return the scores of each split, and the set of predicted answers over all splits."""
    scores, answers = {}, set[Any]()
    for name, rows, predictions in outputs:
        scores[name] = _score(task, splits[name], rows, predictions, blame)
        answers |= {*task.predicted(splits[name], rows, predictions)}
    return scores, answers


def _result(
    task: Task,
    model: str,
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
    splits: Mapping[str, Sequence[Any]],
    runs: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    about = {
        "task": task.name,
        "measures": dict(task.measures),
        "primary": task.primary,
        "scale": SHARES,
    }
    examples = {name: len(rows) for name, rows in splits.items()}
    return result_of(about, model, files, {**settings, **task.options()}, examples, runs)


def _one_seed(
    task: Task,
    source: ResolvedModel,
    splits: Mapping[str, Sequence[Any]],
    settings: FineTuneSettings,
    say: Say,
    save_to: Path | None,
    tracked: TrackedRun,
) -> dict[str, Any]:
    seed = settings.seed
    # `load_fresh` draws random weights for the head.
    set_seed(seed)
    tokenizer, model = task.load_fresh(source)
    lr = settings.lr or (ADADELTA_LR if settings.optimizer == "adadelta" else default_lr(model))
    length, cut = _length(task, settings.max_length, model, tokenizer)
    examples = {**splits, "train": task.sample(splits["train"], seed)}
    say(f"seed {seed}: learning rate {lr:g}, {counted(model.num_parameters(), 'parameter')}{cut}")
    rows = {
        name: _encoded(task, name, (tokenizer, length), split, say)
        for name, split in examples.items()
    }

    blame = f" after training at {lr:g}; lower --lr"

    def score_dev(output: Any) -> dict[str, float]:
        return _score(task, examples["dev"], rows["dev"], output.predictions, blame)

    with tempfile.TemporaryDirectory(prefix="fine-tune-") as scratch:
        trainer = WarmupTrainer(
            model=model,
            args=_arguments(scratch, settings, lr),
            train_dataset=rows["train"],
            eval_dataset=rows["dev"],
            data_collator=task.collator(tokenizer),
            compute_metrics=score_dev,
        )
        _set_steps(trainer, settings, lr)
        measures = {heading: f"eval_{name}" for heading, name in task.measures.items()}
        TrainingProgress(say, {"held-out loss": "eval_loss", **measures}, f"seed {seed}, ").follow(
            trainer
        )
        trainer.add_callback(tracked)
        trainer.train()
        curve = [row["eval_primary"] for row in trainer.state.log_history if "eval_primary" in row]
        # Of epochs with equal scores, `argmax` returns the first, and the Trainer retains the
        # first.
        result: dict[str, Any] = {"seed": seed, "lr": lr, "best_epoch": 1 + int(np.argmax(curve))}
        trainer.compute_metrics = None  # `predict` would score every split as if it were dev
        scored = {name: split for name, split in splits.items() if name != "train"}
        outputs = ((name, rows[name], _predict(trainer, rows[name])) for name in scored)
        scores, answers = _scored(task, scored, outputs, blame)
        tracked.add_scores(scores)
        if save_to is not None and (note := _save(task, trainer, tokenizer, save_to)):
            result["note"] = note
    say(f"seed {seed}: best after epoch {result['best_epoch']}")
    duration = f"--steps ({settings.steps})" if settings.steps else f"--epochs ({settings.epochs})"
    remedy = f"raise --lr ({lr:g}) or {duration}"
    return result | scores | warn_if_constant(task, scored, answers, remedy, say, f"seed {seed}: ")


def _save(task: Task, trainer: Trainer, tokenizer: Any, folder: Path) -> str:
    """Save the trained model. Returns the task's note for its users; see `Task.finish`."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    note = task.finish(network)
    network.save_pretrained(folder)
    apply_umask(folder)
    save_tokenizer(tokenizer, folder)
    return note


def default_lr(model: Any) -> float:
    """Return the default learning rate for fine-tuning a model.

    5e-5 as for BERT (Devlin et al. 2019), 5e-4 for encoders with a hidden size below 384, 3e-3 for
    BiLSTMs.
    """
    # Measured on English parts of speech, 3 epochs of 1,500 sentences. Untrained BiLSTMs with 100
    # and 300 units per direction reach an accuracy of 0.80 and 0.87 with 1e-3, 0.88 and 0.90 with
    # 3e-3.
    if isinstance(model.config, BiLstmConfig):
        return 3e-3
    # The best rate of Adam grows as the hidden size falls (Yang et al. 2022). A model of hidden
    # size 128 reaches 0.42 with 5e-5 and 0.77 with 5e-4.
    return 5e-4 if model.config.hidden_size < SMALL_WIDTH else 5e-5


def _encoded(
    task: Task, split: str, by: tuple[Any, int], examples: Sequence[Any], say: Say
) -> list[dict[str, Any]]:
    """Make the model inputs of a split, and print the task's notes. `by`: tokenizer and maximum
    length."""
    rows = task.encode(by[0], examples, by[1])
    for line in task.take_notes():
        say(f"{split}: {line}")
    return rows


def _length(task: Task, max_length: int | None, model: Any, tokenizer: Any) -> tuple[int, str]:
    """Return the maximum length of an input, and a note if the model's limit reduces it."""
    max_length = max_length or task.max_length
    length = min(max_length, input_limit(model.config, tokenizer))
    return length, f", at most {length} tokens (the model's limit)" if length < max_length else ""


def _predict(trainer: Trainer, rows: Sequence[dict[str, Any]]) -> Any:
    # Without labels: the loss of the model's own problem_type may not accept them.
    inputs = [{name: row[name] for name in row if name != "labels"} for row in rows]
    return trainer.predict(inputs).predictions  # type: ignore[arg-type]


def _score(
    task: Task,
    examples: Sequence[Any],
    rows: Sequence[dict[str, Any]],
    predictions: Any,
    blame: str,
) -> dict[str, float]:
    parts = predictions if isinstance(predictions, tuple) else (predictions,)
    # argmax of NaN is a valid index, so that a broken model would have a score like any other.
    if not all(np.isfinite(part).all() for part in parts):
        raise UserError(f"the model predicts NaN or infinity{blame}")
    scores = task.score(examples, rows, predictions)
    return {"primary": scores[task.primary], **scores}


def _scoring(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_eval_batch_size": 64,
        "disable_tqdm": True,  # `TrainingProgress` prints instead
        # Without a GPU torch ignores it, and warns.
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
    }


def _set_steps(trainer: Trainer, settings: FineTuneSettings, lr: float) -> None:
    """Set an optimizer other than AdamW; with gradient accumulation, let the Trainer divide the
    loss."""
    if settings.optimizer != "adamw":
        assert trainer.model is not None
        trainer.optimizer = optimizer_of(
            trainer.model, settings.optimizer, lr=lr, weight_decay=WEIGHT_DECAY, betas=BETAS
        )
    if settings.accumulate > 1:
        # The heads of transformers accept `num_items_in_batch`, so that the Trainer leaves the
        # division of the loss to them. Most heads do not divide it.
        trainer.model_accepts_loss_kwargs = False


def _arguments(folder: str, settings: FineTuneSettings, lr: float) -> TrainingArguments:
    return TrainingArguments(
        **_scoring(folder),
        num_train_epochs=settings.epochs,
        max_steps=settings.steps or -1,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=lr,
        warmup_steps=settings.warmup,
        weight_decay=WEIGHT_DECAY,
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),  # else the Trainer refuses bf16 on a CPU
        seed=settings.seed,
        # Batches are drawn at random. Grouped by length they took 0.7 to 0.8 of the time, but one
        # of three seeds was worse (benchmarks/RESULTS.md).
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        # The folder is temporary: nothing is resumed from it, and the optimizer's state is twice
        # the weights.
        save_only_model=True,
        save_total_limit=1,
        include_num_input_tokens_seen=COUNTED,
        load_best_model_at_end=True,
        metric_for_best_model="eval_primary",
        greater_is_better=True,
    )
