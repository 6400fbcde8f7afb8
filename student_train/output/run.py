"""A complete training: from options to a transformers folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from teachonce.checkpoints.chat_template import plain_template
from teachonce.checkpoints.checkpoint_tokenizer import save_tokenizer
from teachonce.checkpoints.sentence_folder import VectorHead, write_sentence_folder
from teachonce.store import FeatureStore
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.tools.stored_tokens import check_tokens
from teachonce.student_train.arguments import with_store_defaults
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.vocabularies import check_teacher_vocabulary
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.model.freezing import merge_low_rank
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.output.card import environment, hub_id, model_card
from teachonce.student_train.output.report import (
    LOGS,
    SETTINGS,
    add_earlier_environments,
    check_same_training,
    trained_on_chats,
)
from teachonce.student_train.plan.checks import check_memory, checked_plan
from teachonce.student_train.plan.train_plan import Stores, TrainPlan
from teachonce.student_train.plan.vector_space import inherited_settings, lost_lengths
from teachonce.student_train.prepared_student import Prepared, make_collator, prepare_plan
from teachonce.student_train.settings.option_values import FOLDER
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.evaluate import LEAST_TEXTS, check_held_out
from teachonce.student_train.train.student_training import Callbacks, Trained, train_plan
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.redaction import redacted
from teachonce.training.checkpoint import remove_checkpoints
from teachonce.training.ranks import ALONE, Ranks, join_ranks
from teachonce.training.wordpiece import fewer_pieces


def run(
    options: TrainOptions, *, resume: bool = False, say: Any = lambda line: None
) -> dict[str, Any]:
    """Train a student and write it to its folder. Returns the content of training.json.

    say: receives lines for the user, such as warnings and progress.
    Options that were not given have the defaults of the command, which depend on the stores. A
    finished student of the same options is left unchanged. Raises UserError for invalid input,
    before anything is written; UserError and Stopped during the training as `train_plan` does.
    """
    if not isinstance(options, TrainOptions):
        raise TypeError(
            f"run: expected TrainOptions, got {type(options).__name__}; call"
            " run(TrainOptions(store, vocab=...))"
        )
    with open_stores(options) as stores:
        filled = with_store_defaults(options, stores)
        return run_plan(checked_plan(filled, *stores).resolved(), resume=resume, say=say)


def run_plan(plan: TrainPlan, *, resume: bool, say: Any) -> dict[str, Any]:
    """Train the student of a resolved and checked plan; see `run`."""
    with join_ranks(plan.options.device) as ranks:
        say = say if ranks.is_main else lambda line: None
        check_memory(plan)
        if ranks.size > 1:
            texts = ranks.size > plan.options.accumulate
            shared = "texts of each batch" if texts else "batches of each step"
            say(f"processes {ranks.size}, which share the {shared}")
        return train_student(plan, resume=resume, say=say, ranks=ranks)


@contextmanager
def open_stores(options: TrainOptions) -> Iterator[list[FeatureStore]]:
    """Open the stores of a training until the end of the `with` block.

    Raises StoreError for an unreadable store, and as `check_tokenizers` does.
    """
    paths = (options.store, *options.others)
    with closing(Stores(paths, options.allow_partial, options.cache)) as stores:
        for store in stores.opened:
            check_tokenizers(store)
        yield stores.opened


def check_tokenizers(store: FeatureStore) -> None:
    """Raise StoreError if the installed tokenizers package produces other tokens than the stored
    ones, or if reading the stored vocabulary exceeds the limits of `check_teacher_vocabulary`."""
    check_tokens(store)
    check_teacher_vocabulary(store)


def train_student(
    plan: TrainPlan,
    *,
    resume: bool,
    say: Any,
    prepared: Prepared | None = None,
    on_validation: Callable[[int, dict[str, float]], object] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Train the student of a resolved and checked plan; see `run`.

    prepared: the result of `prepare` for the plan, if it was called already.
    on_validation: receives the step and figures of each validation, and may raise to stop.
    ranks: the processes of the training; only the first writes files.
    """
    out = plan.options.out_folder()
    files.check_utf8(out)
    report = _initial_report(plan, ranks)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Without the lease, two trainings in one folder would mix their checkpoints.
        with closing(Lease(out)) if ranks.is_main else nullcontext():
            # Only the first process checks: another one may find the folder that the first made.
            before: dict[str, Any] | None = ranks.broadcast(
                check_same_training(out, report, resume) if ranks.is_main else None
            )
            if before is not None and "result" in before:
                say(f"finished  {out} was trained to its end; there is nothing to do")
                return before
            if prepared is None:
                say("start     makes the vocabulary and the initial weights")
            student, collator, report["start"] = prepared or prepare_plan(plan)
            tokenizer = collator.student_tokenizer
            content = tokenizer.backend_tokenizer.to_str().encode()
            report["tokenizer"] = hashlib.sha256(content).hexdigest()
            if plan.options.shape.causal:
                report["chats"] = _answers_chats(plan, tokenizer)
            retained = _pieces_after_pruning(plan, collator, say)
            if before is not None:
                add_earlier_environments(out, before, report, say)
            _say_start(plan, report["start"], collator, say)
            others = [make_collator(plan, store, tokenizer) for store in plan.stores[1:]]
            if line := check_held_out(plan, [collator, *others]):
                say(line)
            if ranks.is_main:
                for name in LOGS if before is None else ():
                    files.discard(out, name)  # of a training that failed before its checkpoint
                _make_folder(plan, out, report)
            trained = train_plan(
                plan,
                student,
                [collator, *others],
                out,
                resume=resume,
                callbacks=Callbacks(on_validation=on_validation, say=say, say_progress=True),
                ranks=ranks,
            )
            finished: dict[str, Any] = ranks.broadcast(
                _finish(plan, report, trained, collator, retained) if ranks.is_main else None
            )
            return finished
    except (OSError, SafetensorError) as error:
        started = (out / SETTINGS).exists()
        then = "continue with --resume" if started else "run the same command again"
        raise UserError(
            f"{out}: cannot be written: {files.reason(error)} and {then}, or give another --out"
        ) from error


def _initial_report(plan: TrainPlan, ranks: Ranks) -> dict[str, Any]:
    """Return what training.json holds before the student is prepared."""
    options, stores = plan.options, plan.stores
    report: dict[str, Any] = {
        "settings": redacted(options.describing()),
        "store": _origin(stores[0]),
        "others": [_origin(other) for other in stores[1:]],
        "environments": [environment(options.device, ranks.size)],
    }
    if "record" in options.needs:
        report["recipe"] = options.needs["record"]
    return report


def _answers_chats(plan: TrainPlan, tokenizer: Any) -> bool:
    """Return whether a decoder is trained on chats, or continues a model that was."""
    # A template is no proof of chats: every vocabulary of the teacher has the teacher's template.
    if not plain_template(tokenizer):
        return False
    if any(store.features.learn for store in plan.stores):
        return True
    return plan.options.init.startswith(FOLDER) and trained_on_chats(
        Path(plan.options.init.removeprefix(FOLDER))
    )


def _say_start(plan: TrainPlan, start: Sequence[str], collator: Collator, say: Any) -> None:
    """Print where the weights come from, and which inputs and options have no effect."""
    for line in start:
        say(f"start     {line}")
    if cut := collator.cut_line():
        say(f"start     {cut}")
    of_vectors = any(term.loss.of_vectors for term in plan.terms)
    for line in filter(None, map(lost_lengths, plan.stores if of_vectors else ())):
        say(f"vectors   {line}")
    texts = int(np.diff(plan.sources[0].held_out, axis=1).sum())
    if of_vectors and 0 < texts < LEAST_TEXTS:
        say(
            f"vectors   valid_spearman needs {LEAST_TEXTS} held-out texts, and there"
            f" {'is' if texts == 1 else 'are'} {texts}; raise --held-out"
        )
    if not of_vectors and any(store.features.embedding for store in plan.stores):
        say("losses    none uses the text vectors in the store")
    for loss in sorted(plan.zero_losses()):
        say(
            f"losses    {loss} is 0 with --vocab {plan.options.vocab}: no token begins inside one"
            " of the teacher's"
        )
    # Not refused: the students of a sweep over losses share their other options.
    for option in plan.unread():
        say(f"unread    nothing in this training uses {option}: it has no effect")


def _make_folder(plan: TrainPlan, out: Path, report: Mapping[str, Any]) -> None:
    for store in plan.stores:
        # Before the folder exists, so that `feature-store forget` lists it after any kill.
        record_copy(store.source.address, store.manifest, "student", out)
    out.mkdir(exist_ok=True)
    files.write(out / SETTINGS, json.dumps(report, indent=1).encode())


def _pieces_after_pruning(plan: TrainPlan, collator: Collator, say: Any) -> list[str] | None:
    """Return the pieces that `--prune-to` retains, or None for all."""
    size = plan.options.prune_to
    if size is None:
        return None
    try:
        other = student_tokenizer(size, plan.store)
    except UserError as error:
        raise UserError(str(error).replace("--vocab", "--prune-to", 1)) from error
    if fewer := fewer_pieces(size, len(other)):
        say(f"prune to  {fewer.replace('--vocab', '--prune-to')}")
    tokenizer = collator.student_tokenizer
    retained = shared_pieces(tokenizer, other, size)
    say(
        f"prune to  {len(retained):,} of {len(tokenizer):,} pieces, after the training; the figures"
        " are measured before, with all pieces"
    )
    return retained


def _origin(store: FeatureStore) -> dict[str, Any]:
    return {
        "identity": store.identity,
        "features": store.features.to_json(),
        "content": store.manifest.content(),
        "state": store.meta["state"],
        "software": store.meta["software"],
    }


def _finish(
    plan: TrainPlan,
    report: dict[str, Any],
    trained: Trained,
    collator: Collator,
    retained: list[str] | None,
) -> dict[str, Any]:
    options, stores = plan.options, plan.stores
    out = options.out_folder()
    student, tokenizer = trained.student.eval(), collator.student_tokenizer
    student.cpu()
    if options.lora:
        merge_low_rank(student)
    head = trained.vector_head
    if retained is not None:
        report = {**report, "pruned": {"pieces": len(retained), "of": len(tokenizer)}}
        student, tokenizer = pruned(student, tokenizer, retained)
    transformers_logging.disable_progress_bar()
    with files.staged_files(out) as new:
        if head is None:
            student.save_pretrained(new)
            parameters = student.num_parameters()
        else:
            longest = tokenizer.model_max_length
            parameters = _save_embedder(student, head, plan.terms, stores, longest, new)
        save_tokenizer(tokenizer, new)
        files.apply_umask(new)
    result = {
        **trained.validation,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 1),
        "parameters": parameters,
    }
    report = {**report, "result": result}
    unread = plan.without_effect()
    card = model_card(report, hub_id(stores[0]), student, head is not None, unread)
    files.write(out / "README.md", card.encode())
    # Last, as its `result` is what marks a student as finished.
    files.write(out / SETTINGS, json.dumps(report, indent=1).encode())
    remove_checkpoints(out / "checkpoints")
    return report


def _save_embedder(
    student: PreTrainedModel,
    head: VectorHead,
    terms: Sequence[Term],
    stores: Sequence[FeatureStore],
    longest: int,
    out: Path,
) -> int:
    """Save a student as a sentence-transformers folder. Returns the number of parameters.

    longest: the max length in tokens. The masked-LM head is left out if no loss trained it.
    """
    of_vocabulary = any(term.loss.head == "vocabulary" for term in terms)
    saved: Any = student if of_vocabulary else student.base_model
    saved.save_pretrained(out)
    static = student.config.model_type == "static"
    write_sentence_folder(
        out, head, max_length=longest, static=static, **inherited_settings(stores)
    )
    return int(saved.num_parameters()) + sum(p.numel() for p in head.parameters())
