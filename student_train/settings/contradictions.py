"""Finds options of a training that contradict each other, before a store is opened."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from teachonce.store.containers.cache_option import is_disk_cache
from teachonce.student_train.losses import registry
from teachonce.student_train.losses.loss import Loss
from teachonce.student_train.settings.option_fields import BILSTM, OptionFields
from teachonce.student_train.settings.option_values import (
    CUT_RATE,
    FOLDER,
    is_model_folder,
    is_shape_of_model,
    stays_in_memory,
)
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.errors import UserError
from teachonce.support.options import default_of, flag_of, scoped
from teachonce.training.optimizer import ENDLESS

if TYPE_CHECKING:
    from teachonce.student_train.settings.options import TrainOptions

NEXT = "bytes"  # the only alignment in which both sides predict at the same position
TRIMS = (
    "trims white space, but losses on next tokens need tokens of teacher and student that end at"
    " the same byte"
)


def check_together(options: TrainOptions, unknown: Collection[str] = ()) -> None:
    """Raise UserError for the first options that contradict each other.

    unknown: `loss` and `student`, if the stores decide them; options are not compared with these.
    """
    _check_length(options)
    _check_schedule(options)
    _check_start(options)
    # The default rate depends on the student.
    if "student" not in unknown or options.lr is not None:
        _check_rate(options)
    _check_bilstm(options)
    if "loss" not in unknown:
        losses = registry.named(options.loss)
        _check_data(options, losses)
        if "student" not in unknown:
            _check_predictions(options, losses)
        _check_losses(options, losses)
    _check_cache(options)


def _check_length(options: TrainOptions) -> None:
    if options.steps is not None and options.epochs is not None:
        raise UserError("--steps and --epochs contradict each other: give one")
    if options.steps == 0 and (options.init != "random" or options.stages):
        raise UserError(
            "--steps 0: expected at least 1, or --init random without stages, which saves the"
            " untrained student"
        )
    # Compared with its default, because `batch_tokens` has a value even if it was not given.
    if options.batch_texts and options.batch_tokens != default_of(OptionFields, "batch_tokens"):
        raise UserError("--batch-tokens and --batch-texts contradict each other: give one")
    if (judged := options.judged_by()) and not options.held_out:
        raise UserError(
            f"{judged[0]} and --held-out 0: nothing to validate on; give --held-out a share"
            f" above 0, or leave {judged[0]} out"
        )


def _check_schedule(options: TrainOptions) -> None:
    if options.lr_end and options.schedule in ENDLESS:
        raise UserError(
            f"--lr-end {options.lr_end:g} and --schedule {options.schedule}: a {options.schedule}"
            " schedule has no end; use linear or cosine"
        )


def _check_rate(options: TrainOptions) -> None:
    most = options.resolved_lr
    if options.lr is None and options.shape.causal:
        most *= CUT_RATE  # the store decides whether it has this rate
    if options.lr_end > most:
        raise UserError(f"--lr-end {options.lr_end:g}: expected at most --lr, here {most:g}")


def _check_start(options: TrainOptions) -> None:
    folder = options.init.removeprefix(FOLDER)
    # --student DIR sets --init, but only when the stores are open.
    if options.lora and folder == options.init and not is_model_folder(options.student):
        raise UserError(
            f"--lora {options.lora}: trains low-rank changes of a trained model, and --init is"
            f" {options.init}; give --student DIR, the folder of such a model, or leave --lora out"
        )


def _check_bilstm(options: TrainOptions) -> None:
    of_bilstm = [name for name in scoped(OptionFields, BILSTM) if getattr(options, name)]
    flags = [f"{flag_of(name)} {getattr(options, name)}" for name in sorted(of_bilstm)]
    flags += ["--projection student"] if options.projection == "student" else []
    # Also checked before the stores decide the student: neither the default student nor a student
    # with the shape of a model is a BiLSTM.
    if flags and (is_shape_of_model(options.student) or options.shape.kind != "bilstm"):
        raise UserError(
            f"{flags[0]}: applies only to a BiLSTM, and --student is {options.student}; leave it"
            " out, or choose bilstm:E,H"
        )


def _check_data(options: TrainOptions, losses: Sequence[Loss]) -> None:
    gold = {loss.name for loss in losses if loss.of_gold}
    no_gold = options.loss.keys() - gold
    if options.data == "unlabelled" and gold:
        raise UserError(
            f"--loss {min(gold)} and --data unlabelled: unlabelled text has no gold labels;"
            " choose other losses, or --data all"
        )
    if options.data == "balanced" and not (gold and no_gold):
        lacking = "for unlabelled text, such as kl=1" if gold else "on gold labels, such as ce=1"
        raise UserError(f"--data balanced: --loss names no loss {lacking}; add one")


def _check_losses(options: TrainOptions, losses: Sequence[Loss]) -> None:
    masked = [f"--loss {loss.name}" for loss in losses if loss.student == "masked"]
    masked += ["--targets masked"] if options.targets == "masked" else []
    if masked and not options.mask_prob:
        raise UserError(f"--mask-prob 0: {masked[0]} needs masked tokens; give a share above 0")
    for loss in losses:
        aligned = options.loss_alignments.of(loss.name)
        if loss.teacher == "shared" and ALIGNMENTS[aligned].predicted != "same":
            valid = [name for name, strategy in ALIGNMENTS.items() if strategy.predicted == "same"]
            raise UserError(
                f"--align {aligned}: --loss {loss.name} compares only pieces that both vocabularies"
                f" have, and {aligned} pairs different pieces, too; use"
                f" {' or '.join(f'--align {loss.name}={name}' for name in valid)}"
            )
    nested = [loss for loss in registry.named(options.losses()) if loss.nests]
    if options.matryoshka and not nested:
        raise UserError(
            f"--matryoshka {','.join(map(str, options.matryoshka))}: no loss compares parts of a"
            " vector; add similarity or similarity-kl to --loss"
        )


def _check_predictions(options: TrainOptions, losses: Sequence[Loss]) -> None:
    """Check that a decoder is trained on next tokens, and any other student on masked
    tokens."""
    causal = options.shape.causal
    predicted = [loss for loss in losses if loss.head == "vocabulary"]
    wrong = [loss.name for loss in predicted if loss.of_next != causal]
    if wrong:
        valid = dict.fromkeys(
            loss.name
            for loss in registry.LOSSES
            if loss.head == "vocabulary" and loss.of_next == causal
        )
        kind = "a decoder, which predicts next tokens" if causal else "not a decoder"
        raise UserError(
            f"--loss {wrong[0]}: --student {options.student} is {kind}; use {', '.join(valid)} or"
            " losses of hidden states"
        )
    if causal:
        _check_decoder(options, losses)
    own = options.loss_alignments.own
    trimmed = [loss.name for loss in predicted if loss.of_next and own.get(loss.name, NEXT) != NEXT]
    if trimmed:
        raise UserError(
            f"--align {trimmed[0]}={own[trimmed[0]]}: {own[trimmed[0]]} {TRIMS}; leave --align out,"
            f" or give {trimmed[0]}={NEXT}"
        )


def check_alignment_is_read(options: TrainOptions) -> None:
    """Raise UserError if `--align` names a loss that no stage has. For a decoder, also raise
    UserError if `--align` gives an alignment without a loss name, and no loss of any stage reads
    it."""
    own, bare = options.loss_alignments.own, options.loss_alignments.bare
    losses = options.losses()
    if unused := [name for name in own if name not in losses]:
        raise UserError(
            f"--align {unused[0]}={own[unused[0]]}: {unused[0]} is not among the losses"
            f" {', '.join(sorted(losses))}; add it to --loss, or leave it out of --align"
        )
    aligned = [loss for loss in registry.named(losses) if not loss.without_teacher]
    unread = all(loss.of_next or loss.name in own for loss in aligned)
    if options.shape.causal and unread and bare not in ("", NEXT):
        raise UserError(f"--align {bare}: {bare} {TRIMS}; leave --align out, or give {NEXT}")


def _check_decoder(options: TrainOptions, losses: Sequence[Loss]) -> None:
    """Raise UserError for options that a decoder does not support."""
    of_texts = [loss.name for loss in losses if loss.student == "sentence"]
    if of_texts:
        raise UserError(
            f"--loss {of_texts[0]}: --student {options.student} is a decoder, which has no state"
            " of a whole text; use hidden"
        )
    if options.prune_to is not None:
        raise UserError(
            f"--prune-to {options.prune_to}: only WordPieces can be pruned after the training, and"
            f" --student {options.student} is a decoder; give --vocab pruned:SIZE"
        )
    masks = {
        "--targets masked": options.targets == "masked",
        "--mask-words rare": options.mask_words == "rare",
        f"--max-masks {options.max_masks}": options.max_masks is not None,
        f"--mask-prob {options.mask_prob:g}": options.mask_prob
        != default_of(OptionFields, "mask_prob"),
        f"--view {options.view}": bool(options.view),
    }
    if refused := [option for option, is_set in masks.items() if is_set]:
        raise UserError(
            f"{refused[0]}: --student {options.student} is a decoder, which reads no masks;"
            f" leave {refused[0].split()[0]} out"
        )


def _check_cache(options: TrainOptions) -> None:
    if is_disk_cache(options.cache) and not any(
        "://" in str(path) for path in (options.store, *options.others)
    ):
        raise UserError(
            f"--cache {options.cache}: applies only to remote stores, and {options.store} is on"
            " this machine; leave --cache out, or give ram"
        )
    if options.workers and stays_in_memory(options.cache):
        raise UserError(
            f"--cache {options.cache} and --workers {options.workers}: each worker would hold its"
            " own copy of the store; give one of the two"
        )
