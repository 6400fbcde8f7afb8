"""Trains a masked LM with the transformers Trainer: a checkpoint, or a model from scratch.

A model from scratch has a WordPiece vocabulary of the text and random weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, TrainerCallback, TrainingArguments, set_seed

from teachonce.checkpoints.checkpoint_tokenizer import note_on_pieces, save_tokenizer
from teachonce.checkpoints.loading import (
    checked_length,
    load_config,
    load_network,
    load_tokenizer,
)
from teachonce.checkpoints.names import ResolvedModel, resolve_model
from teachonce.downstream.mlm.masked_trainer import (
    BatchMasking,
    BlockDataset,
    MaskedBatches,
    MlmTrainer,
    StepsOfThisRun,
    TrainingMinutes,
    on_one_device,
)
from teachonce.downstream.mlm.text_blocks import blocks, hold_out
from teachonce.downstream.options import OPTION
from teachonce.downstream.progress import COUNTED, TrainingProgress
from teachonce.downstream.settings import MlmSettings, check_new_folder
from teachonce.downstream.text_lines import read_lines
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.student_tokenizer import train_student_wordpiece
from teachonce.student_train.settings.shapes import SCRATCH, parse_student
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.differences import describe_changes
from teachonce.support.errors import UserError
from teachonce.support.signals import stoppable
from teachonce.training.ranks import ALONE, Ranks
from teachonce.training.wordpiece import fewer_pieces, vocabulary_size

SETTINGS_FILE, CHECKPOINTS, METRICS = "settings.json", "checkpoint-*", "metrics.json"
STATE = "trainer_state.json"
EVAL_SEED = 0
EVAL_MASK_PROB = 0.15  # independent of --mask-prob, so that losses can be compared
EVAL_TOKENS = 32_768
MOST_STEPS = 500  # largest default number of steps between validations and checkpoints
MAX_LOSS = 100.0  # nats per token; the loss of a network with undamaged weights is far below


def train_mlm(
    settings: MlmSettings,
    say: Callable[[str], None] = print,
    ranks: Ranks = ALONE,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train a masked LM, save it as a transformers folder and return the figures of `metrics.json`.

    ranks: the processes that share each batch; the first of them writes.
    callbacks: further callbacks of the Trainer.

    The `minutes` of a resumed run include the time up to its checkpoint.

    Raises UserError for a wrong model, text, size or output folder, and if the loss becomes NaN or
    infinite.
    """
    _check_out(settings)
    if settings.batch_size % ranks.size:
        raise UserError(
            f"--batch-size {settings.batch_size} and {ranks.size} processes: a batch cannot be"
            f" divided evenly between them; give a multiple of {ranks.size}"
        )
    ranks.any(False)  # a barrier: the first process writes into the folder that all have checked
    set_seed(settings.seed)
    column = settings.text_column
    lines = [line for path in settings.train for line in read_lines(path, column)]
    train, held_out = (
        (lines, read_lines(settings.dev, column)) if settings.dev is not None else hold_out(lines)
    )
    model, tokenizer = _load(settings, train, say)
    if not torch.cuda.is_available():
        # On a CPU the backward pass of eager attention is faster than the fused kernel's.
        model.set_attn_implementation("eager")
    length = checked_length(settings.max_length, model.config, tokenizer)
    rows = blocks(tokenizer, train, length, "training text")
    if settings.model.startswith(SCRATCH):
        start_from_frequencies(model, rows)
    # As the Trainer computes it from `batch_size`.
    batch = _arguments(settings, every=1).train_batch_size
    if len(rows) < batch:
        raise UserError(
            f"training text: {counted(len(rows), 'block')} of {length} tokens, too few for one "
            f"batch of {batch}; add text or lower --batch-size (or --batch-tokens)"
        )
    every = blocks(tokenizer, held_out, length, "held-out text")
    dev_rows = every[: max(1, EVAL_TOKENS // length)]  # a validation must be short
    sampled = f" (the first of {len(every):,})" if len(dev_rows) < len(every) else ""
    say(
        f"{counted(len(rows), 'training block')} and {counted(len(dev_rows), 'held-out block')}"
        f"{sampled} of {length} tokens; "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; "
        f"learning rate {_lr(settings):g}"
    )
    # After all refusals: a training that cannot start leaves no folder.
    if ranks.is_main:
        settings.out.mkdir(parents=True, exist_ok=True)
        files.write(
            settings.out / SETTINGS_FILE, json.dumps(recorded_settings(settings), indent=1).encode()
        )
        save_tokenizer(tokenizer, settings.out)  # before training: a resumed run loads it
    # Minutes differ between processes; all return the figures of the first.
    figures: dict[str, Any] = ranks.broadcast(
        _run(settings, model, tokenizer, (rows, dev_rows), say, ranks, callbacks)
    )
    return figures


def _newest_checkpoint(out: Path) -> str | None:
    """Return the folder of the newest complete checkpoint; None if there is none."""
    # The Trainer writes the state last: a checkpoint without a readable state is incomplete.
    folders = dict[int, Path]()
    for folder in out.glob(CHECKPOINTS):
        with suppress(OSError, ValueError, KeyError, TypeError):
            folders[int(json.loads((folder / STATE).read_text("utf-8"))["global_step"])] = folder
    return str(folders[max(folders)]) if folders else None


def _run(
    settings: MlmSettings,
    model: Any,
    tokenizer: Any,
    blocks_of: tuple[Array, Array],
    say: Any,
    ranks: Ranks,
    callbacks: Sequence[TrainerCallback],
) -> dict[str, Any]:
    rows, dev_rows = blocks_of  # blocks of training and of validation
    every = _every(settings, len(rows))
    trainer = MlmTrainer(
        model=model,
        args=_arguments(settings, every, ranks),
        ranks=ranks,
        train_dataset=BlockDataset(rows),
        fixed_dev=held_out_batches(tokenizer, dev_rows),
        data_collator=BatchMasking(tokenizer, settings.mask_prob, settings.seed + 1),
        processing_class=tokenizer,
    )
    TrainingProgress(say, {"held-out loss": "eval_loss"}, unit="block").follow(trainer)
    clock = TrainingMinutes()
    for callback in (clock, StepsOfThisRun(), *callbacks):
        trainer.add_callback(callback)
    # Before a checkpoint is loaded, so that a resumed run reports the same loss as the first run.
    before = trainer.evaluate()["eval_loss"]
    say(f"held-out loss before: {before:.4f} nats per masked token")
    advice = (
        f"{settings.out}: has a checkpoint every {counted(every, 'step')}; continue with the same"
        " command and --resume"
    )
    with stoppable(lambda: advice):
        trainer.train(resume_from_checkpoint=_newest_checkpoint(settings.out))
    after = trainer.evaluate()["eval_loss"]
    check_loss(after, f" after training at {_lr(settings):g}; lower --lr and give another --out")
    minutes = clock.spent()
    steps = counted(trainer.state.global_step, "step")
    say(f"held-out loss after:  {after:.4f} ({steps}, {minutes:.1f} min)")
    if ranks.is_main:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(settings.out)
        files.apply_umask(settings.out)
    figures = {
        "blocks": {"train": len(rows), "dev": len(dev_rows)},
        "learning_rate": _lr(settings),
        "held_out_loss_before": before,
        "held_out_loss": after,
        "perplexity": math.exp(after),
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * settings.batch_size * rows.shape[1],
        "minutes": minutes,
        "curve": [row for row in trainer.state.log_history if "eval_loss" in row],
    }
    if ranks.is_main:
        # It marks a finished training for `resumed_figures`: written after the weights, and before
        # the checkpoints are removed.
        files.write(settings.out / METRICS, json.dumps(figures, indent=1).encode())
        for checkpoint in settings.out.glob(CHECKPOINTS):
            shutil.rmtree(checkpoint)
    return figures


def check_loss(loss: float, blame: str) -> None:
    """Raise UserError for a loss that is NaN, infinite or above MAX_LOSS."""
    # `not <` and not `>=`, because every comparison with NaN is false.
    if not loss < MAX_LOSS:
        raise UserError(f"the model's loss is {loss:g}{blame}")


def held_out_batches(tokenizer: Any, rows: Any) -> MaskedBatches:
    """Make the masked batches of a validation."""
    # Always in batches of the same size: the masks depend on the whole batch.
    masking = BatchMasking(tokenizer, EVAL_MASK_PROB, EVAL_SEED)
    return MaskedBatches(masking, rows, MlmSettings.batch_size)


def _lr(settings: MlmSettings) -> float:
    return settings.lr or (1e-3 if settings.model.startswith(SCRATCH) else 2e-4)


def _every(settings: MlmSettings, blocks: int) -> int:
    """Return the number of steps between validations: by default a tenth of all steps, at most
    MOST_STEPS."""
    epoch = blocks // settings.batch_size
    steps = settings.epochs * epoch if settings.steps is None else settings.steps
    return settings.evaluate_every or min(MOST_STEPS, max(1, round(steps / 10)))


def _arguments(settings: MlmSettings, every: int, ranks: Ranks = ALONE) -> TrainingArguments:
    # The first process makes and masks each batch, as a single process does, and sends each process
    # a share.
    shares = {"split_batches": True, "dispatch_batches": True} if ranks.size > 1 else None
    arguments = TrainingArguments(
        accelerator_config=shares,
        # NCCL, the usual backend, needs GPUs.
        ddp_backend="gloo" if ranks.size > 1 and not torch.cuda.is_available() else None,
        output_dir=str(settings.out),
        max_steps=settings.steps if settings.steps is not None else -1,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=_lr(settings),
        # A number below 1 is a share of all steps (transformers 5, which has no warmup_ratio).
        warmup_steps=0.05,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),  # else no bf16 on a CPU
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_steps=every,
        save_total_limit=1,
        disable_tqdm=True,  # `TrainingProgress` prints
        include_num_input_tokens_seen=COUNTED,
        # So that each step has `batch_size` blocks, as the figure `tokens` takes for granted.
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
    )
    return on_one_device(arguments)


def _load(settings: MlmSettings, lines: Sequence[str], say: Any) -> tuple[Any, Any]:
    if settings.model.startswith(SCRATCH):
        size = settings.model.removeprefix(SCRATCH)
        parse_student(size, OPTION)  # refuses a wrong size before a vocabulary is trained
        if settings.resume and (settings.out / "tokenizer.json").exists():
            tokenizer = load_tokenizer(ResolvedModel(str(settings.out), str(settings.out)))
        else:
            say(f"training a WordPiece of {settings.vocab} pieces on {len(lines):,} lines")
            tokenizer = train_tokenizer(lines, settings.vocab, settings.max_length)
            if note := fewer_pieces(settings.vocab, len(tokenizer)):
                say(note)
        return make_student(size, tokenizer, settings.max_length, OPTION), tokenizer
    resolved = resolve_model(settings.model)
    # Called for its UserErrors; `load_network` loads the config again.
    load_config(resolved)
    tokenizer = masking_tokenizer(resolved)
    if note := note_on_pieces(tokenizer, lines):
        say(note)
    return load_masked_lm(resolved, say), tokenizer


def masking_tokenizer(model: ResolvedModel) -> Any:
    """Load a tokenizer. Raises UserError if it lacks a special token that masked blocks need."""
    tokenizer = load_tokenizer(model)
    missing = [
        role
        for role in ("cls_token", "sep_token", "mask_token", "pad_token")
        if getattr(tokenizer, role) is None
    ]
    if missing:
        raise UserError(
            f"model {model.name}: its tokenizer has no {', '.join(missing)}; "
            "masked-LM training needs an encoder's tokenizer"
        )
    return tokenizer


def load_masked_lm(resolved: ResolvedModel, say: Callable[[str], None] = print) -> Any:
    """Load a masked LM in float32. If the checkpoint has no head, add one and report it to `say`.

    The added decoder is tied to the word embeddings, its transform is random and its bias zero.
    Raises UserError if more than the head is missing, or transformers cannot load the folder.
    """
    model, missing = load_network(AutoModelForMaskedLM, resolved, dtype=torch.float32)
    if missing:
        output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if output.weight.shape == embeddings.weight.shape:
            output.weight = embeddings.weight
        say(f"head: not in the checkpoint, added: {', '.join(missing)}; decoder tied to embeddings")
    return model


def resumed_figures(settings: MlmSettings) -> dict[str, Any] | None:
    """Return the figures of a finished run that is to be resumed; None for any other run.

    Raises UserError if the run was started with other settings.
    """
    if not settings.resume or not (settings.out / METRICS).exists():
        return None
    _check_same_settings(settings)
    return dict(json.loads((settings.out / METRICS).read_text()))


def recorded_settings(settings: MlmSettings) -> dict[str, Any]:
    """Return the settings that determine the result, as JSON."""
    # Through JSON, to equal what a file holds: paths become strings, and tuples lists.
    now = json.loads(json.dumps({**vars(settings), "lr": _lr(settings)}, default=str))
    # Validations change no weight: a resumed training may validate at another interval.
    ruled_out = ["resume", "out", "evaluate_every"]
    if settings.text_column is None:
        ruled_out.append("text_column")  # trainings from before the option can be continued
    return {name: value for name, value in now.items() if name not in ruled_out}


def _check_out(settings: MlmSettings) -> None:
    if not settings.resume:
        check_new_folder(settings.out)
        return
    _check_same_settings(settings)
    if (settings.out / METRICS).exists():
        raise UserError(
            f"--resume: the training in {settings.out} is finished; choose another --out"
        )


def _check_same_settings(settings: MlmSettings) -> None:
    out, now = settings.out, recorded_settings(settings)
    try:
        before = json.loads((out / SETTINGS_FILE).read_text())
        # Of both: a setting at its default may be missing on either side.
        changes = describe_changes(before, {name: now.get(name) for name in {**before, **now}})
    except (OSError, ValueError, AttributeError, TypeError):
        raise UserError(
            f"--resume: {out} holds no training to continue; leave --resume out"
        ) from None
    if changes:
        raise UserError(
            f"{out}: cannot resume with other settings: {changes}; give the same settings, or"
            " another --out"
        )


def train_tokenizer(lines: Sequence[str], size: str, max_length: int) -> Any:
    """Train a cased WordPiece tokenizer that contains every character of the lines.

    size: number of pieces (30k, 512); fewer if the lines yield fewer.
    Raises UserError if `size` is too small for the characters, as `train_student_wordpiece` does.
    """
    pieces = vocabulary_size(size)
    assert pieces is not None  # the option has refused other words
    tokenizer = train_student_wordpiece(lines, pieces, None)
    tokenizer.model_max_length = max_length
    return tokenizer


def start_from_frequencies(model: Any, rows: Array) -> None:
    """Set the decoder's bias to the log of each token's frequency in the blocks [n, S].

    Counts are increased by 1 (add-one smoothing).
    """
    # The unigram distribution is what a model would learn in its first hundreds of steps.
    bias = model.get_output_embeddings().bias
    counts = np.bincount(rows.ravel(), minlength=len(bias)) + 1.0
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
