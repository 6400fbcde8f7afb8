"""Token classification: fine-tune a checkpoint on word/tag files and score it over seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from downstream.progress import Progress
from downstream.words import Sentence, first_pieces, read_tagged
from store.console import counted
from store.errors import UserError
from teacher_dump.models import DAMAGED, resolve_model

IGNORED = -100
SMALL_WIDTH = 384
MEASURES = {
    "pos": {"macro F1": "eval_primary", "accuracy": "eval_accuracy"},
    "ner": {"entity F1": "eval_primary", "accuracy": "eval_accuracy"},
}
"""What the scores are called, with the Trainer's names of them."""


@dataclass(frozen=True)
class TaggingSettings:
    """How a tagger is fine-tuned. The best epoch is chosen on dev."""

    epochs: int = 3
    batch_size: int = 16
    lr: float | None = None  # that of `default_lr`
    max_length: int = 128
    seeds: int = 3
    seed: int = 0
    limit: int | None = None  # training sentences, the first ones


@dataclass(frozen=True)
class Score:
    """`primary` chooses the epoch: macro F1 for pos, entity F1 for ner. Shares, not percent."""

    primary: float
    accuracy: float


def fine_tune(
    task: str,
    model: str,
    train: Path,
    dev: Path,
    test: Path | None,
    settings: TaggingSettings,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Fine-tune once for each seed; scores on dev, and on test where it is given.

    Returns `{"task", "model", "settings", "seeds": [{"seed", "lr", "best_epoch", "dev", "test"}],
    "mean": {split: Score}, "deviation": ...}`; the deviation is the sample one (0 for a single
    seed). `say` is told a line for each epoch.

    Raises UserError on a wrong model or file, or on tags that are not IOB for ner.
    """
    source = resolve_model(model).path_or_id
    splits = {"train": read_tagged(train)[: settings.limit], "dev": read_tagged(dev)}
    if test is not None:
        splits["test"] = read_tagged(test)
    if task == "ner":
        _check_iob(splits)
    tags = sorted({tag for sentence in splits["train"] for tag in sentence.tags})
    runs = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        runs.append(_one_seed(task, source, splits, tags, settings, seed, say))
    scored = [split for split in ("dev", "test") if split in splits]
    return {
        "task": task,
        "model": model,
        "settings": asdict(settings),
        "sentences": {name: len(rows) for name, rows in splits.items()},
        "seeds": runs,
        "mean": {split: _over_seeds(runs, split, np.mean) for split in scored},
        "deviation": {split: _over_seeds(runs, split, _deviation) for split in scored},
    }


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _over_seeds(runs: Sequence[dict[str, Any]], split: str, reduce: Any) -> dict[str, float]:
    return {name: float(reduce([run[split][name] for run in runs])) for name in runs[0][split]}


def _one_seed(
    task: str,
    source: str,
    splits: dict[str, list[Sentence]],
    tags: list[str],
    settings: TaggingSettings,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    set_seed(seed)
    tokenizer, model = load_tagger(source, tags)
    lr = settings.lr or default_lr(model)
    say(f"seed {seed}: learning rate {lr:g}, {counted(model.num_parameters(), 'parameter')}")
    encoded = {
        name: encode(tokenizer, rows, tags, settings.max_length) for name, rows in splits.items()
    }

    def score(split: str, logits: Any) -> Score:
        return score_words(task, splits[split], encoded[split], logits, tags)

    with tempfile.TemporaryDirectory(prefix="tagger-") as scratch:
        trainer = Trainer(
            model=model,
            args=_arguments(scratch, settings, lr, seed),
            train_dataset=encoded["train"],
            eval_dataset=encoded["dev"],
            data_collator=DataCollatorForTokenClassification(tokenizer),
            compute_metrics=lambda output: asdict(score("dev", output.predictions)),
        )
        Progress(say, {"held-out loss": "eval_loss", **MEASURES[task]}, f"seed {seed}, ").follow(
            trainer
        )
        trainer.train()
        curve = [row["eval_primary"] for row in trainer.state.log_history if "eval_primary" in row]
        result: dict[str, Any] = {"seed": seed, "lr": lr, "best_epoch": 1 + int(np.argmax(curve))}
        for split in splits.keys() & {"dev", "test"}:
            logits = trainer.predict(encoded[split]).predictions  # type: ignore[arg-type]
            result[split] = asdict(score(split, logits))
    say(f"seed {seed}: best after epoch {result['best_epoch']}")
    return result


def _arguments(folder: str, settings: TaggingSettings, lr: float, seed: int) -> TrainingArguments:
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


def default_lr(model: Any) -> float:
    """5e-5, that of BERT (Devlin et al. 2019), and 5e-4 for encoders less than 384 wide.

    The narrower a model, the larger the best rate of Adam (Yang et al. 2022), and with BERT's a
    small student has hardly begun to learn when the epochs are over: 128 wide, 3 epochs of 1,500
    sentences, its accuracy on English parts of speech is 0.42, with 5e-4 it is 0.77.
    """
    return 5e-4 if model.config.hidden_size < SMALL_WIDTH else 5e-5


def load_tagger(source: str, tags: Sequence[str]) -> tuple[Any, Any]:
    """Tokenizer and encoder (float32) with a fresh tagging head: the head is new on purpose.

    Raises UserError where the folder cannot be loaded or lacks weights of the encoder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model, report = AutoModelForTokenClassification.from_pretrained(
            source,
            dtype=torch.float32,
            num_labels=len(tags),
            id2label=dict(enumerate(tags)),
            label2id={tag: number for number, tag in enumerate(tags)},
            ignore_mismatched_sizes=True,  # a checkpoint that is a tagger of other tags
            output_loading_info=True,
        )
    except DAMAGED as error:
        raise UserError(
            f"model {source}: no tagger can be made of it: {str(error).splitlines()[0]}"
        ) from None
    prefix = model.base_model_prefix + "."
    lost = sorted(key for key in report["missing_keys"] if key.startswith(prefix))
    if lost:
        raise UserError(
            f"model {source}: the checkpoint lacks {len(lost)} encoder weights, first {lost[0]}; "
            "copy the whole checkpoint"
        )
    return tokenizer, model


def encode(
    tokenizer: Any, sentences: Sequence[Sentence], tags: Sequence[str], max_length: int
) -> list[dict[str, list[int]]]:
    """Model inputs with `labels`: the tag at the first piece of each word, -100 elsewhere.

    A tag that training never saw is labelled -100 as well: it cannot be predicted, but it counts in
    the score.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    limit = min(max_length, tokenizer.model_max_length)
    rows = []
    for sentence in sentences:
        ids, first = first_pieces(tokenizer, sentence.words, limit)
        labels = [IGNORED] * len(ids)
        for position, tag in zip(first, sentence.tags, strict=True):
            if position >= 0:
                labels[position] = number.get(tag, IGNORED)
        rows.append(
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels, "first": first}
        )
    return rows


def score_words(
    task: str,
    sentences: Sequence[Sentence],
    encoded: Sequence[dict[str, list[int]]],
    logits: np.ndarray[Any, Any],
    tags: Sequence[str],
) -> Score:
    """Score every word. A word without a piece (cut off, or of blanks) has the prediction "O"."""
    best = logits.argmax(-1)
    gold = [list(sentence.tags) for sentence in sentences]
    found = [
        [tags[best[row, position]] if position >= 0 else "O" for position in example["first"]]
        for row, example in enumerate(encoded)
    ]
    flat_gold, flat_found = sum(gold, []), sum(found, [])
    accuracy = float(np.mean(np.array(flat_gold) == np.array(flat_found)))
    if task == "ner":
        from seqeval.metrics import f1_score as entity_f1

        return Score(float(entity_f1(gold, found, zero_division=0)), accuracy)
    from sklearn.metrics import f1_score

    labels = sorted(set(flat_gold))
    macro = f1_score(flat_gold, flat_found, labels=labels, average="macro", zero_division=0)
    return Score(float(macro), accuracy)


def _check_iob(splits: dict[str, list[Sentence]]) -> None:
    for name, sentences in splits.items():
        for sentence in sentences:
            for tag in sentence.tags:
                if tag != "O" and not tag.startswith(("B-", "I-")):
                    raise UserError(
                        f"--{name}: tag {tag!r} is neither O nor B-... nor I-...; "
                        "entity F1 needs IOB tags, take --task pos for others"
                    )
