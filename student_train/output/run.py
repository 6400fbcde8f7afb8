"""A complete training: from options to a transformers folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from teachonce.checkpoints.sentence_settings import declared_activation
from teachonce.checkpoints.tokenizer_folder import save_tokenizer
from teachonce.store import FeatureStore
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.tools.stored_tokens import check_tokens
from teachonce.student_train.data.blocks import output_kind_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.spelled_text import check_spelling
from teachonce.student_train.data.vocabularies import check_vocabulary
from teachonce.student_train.model.any_student import has_attention
from teachonce.student_train.model.decoder_sizes import copied_settings
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.low_rank import add_low_rank, merge_low_rank
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.student_train.model.start import RANDOM, initialise
from teachonce.student_train.model.start_checks import (
    copies_layers,
    resolved_start,
    start_config,
)
from teachonce.student_train.model.student_tokenizer import (
    check_pair_form,
    default_max_length,
    student_tokenizer,
)
from teachonce.student_train.model.word_vectors import set_word_vectors
from teachonce.student_train.output.card import environment, hub_id, model_card
from teachonce.student_train.output.embedder import save_embedder
from teachonce.student_train.output.report import (
    SETTINGS,
    add_earlier_environments,
    check_same_training,
    tokenizer_hash,
)
from teachonce.student_train.plan.checks import check_memory, checked_plan
from teachonce.student_train.plan.train_plan import Stores, TrainPlan, plan_of
from teachonce.student_train.settings.option_fields import BILSTM, NETWORK
from teachonce.student_train.settings.option_values import FOLDER
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.recipe import described
from teachonce.student_train.train.student_training import Callbacks, Trained, train_plan
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.options import scoped
from teachonce.support.redaction import redacted
from teachonce.training.checkpoint import remove_checkpoints
from teachonce.training.ranks import ALONE, Ranks, join_ranks
from teachonce.training.wordpiece import fewer_pieces

Prepared = tuple[PreTrainedModel, Collator, list[str]]
"""A student with initial weights, its collator, and lines that describe the weights; see
`prepare`."""


def run(
    options: TrainOptions, *, resume: bool = False, say: Any = lambda line: None
) -> dict[str, Any]:
    """Train a student and write it to its folder. Returns the content of training.json.

    say: receives lines for the user, such as warnings and progress.
    A finished student of the same options is left unchanged. Raises UserError for invalid input,
    before anything is written.
    """
    with open_stores(options) as stores:
        return run_plan(checked_plan(options, *stores).resolved(), resume=resume, say=say)


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
    ones."""
    check_tokens(store)
    check_vocabulary(store)


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
    options, stores = plan.options, plan.stores
    store = stores[0]
    out = options.out_folder()
    files.check_utf8(out)
    report: dict[str, Any] = {
        "settings": redacted(options.describing()),
        "store": _origin(store),
        "others": [_origin(other) for other in stores[1:]],
        "environments": [environment(options.device, ranks.size)],
    }
    if recipe := options.needs.get("recipe"):
        report["recipe"] = described(recipe)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with closing(Lease(out)) if ranks.is_main else nullcontext():  # two would mix checkpoints
            # Checked by the first process alone: a later one would find the folder that it made.
            before: dict[str, Any] | None = ranks.broadcast(
                check_same_training(out, report, resume) if ranks.is_main else None
            )
            if before is not None and "result" in before:
                say(f"finished  {out} was trained to its end; there is nothing to do")
                return before
            if prepared is None:
                say("start     makes the vocabulary and the initial weights")
            student, collator, report["start"] = prepared or _prepare(plan)
            report["tokenizer"] = tokenizer_hash(collator.student_tokenizer)
            retained = _pieces_after_pruning(options, store, collator, say)
            if before is not None:
                add_earlier_environments(out, before, report, say)
            for line in report["start"]:
                say(f"start     {line}")
            if cut := collator.cut_line():
                say(f"start     {cut}")
            of_texts = any(term.loss.of_text for term in plan.terms)
            if not of_texts and any(each.features.embedding for each in stores):
                say("losses    none of them uses the text vectors in the store")
            # Not refused: the students of a sweep over losses share their other options.
            for option in plan.unread():
                say(f"losses    none of them reads {option}")
            if ranks.is_main:
                for each in stores:
                    # Before there is a folder, so that after any kill `forget` names it as a copy
                    # of the text.
                    record_copy(each.path, each.manifest, "student", out)
                out.mkdir(exist_ok=True)
                files.write(out / SETTINGS, json.dumps(report, indent=1).encode())
            others = [make_collator(plan, each, collator.student_tokenizer) for each in stores[1:]]
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
        raise UserError(
            f"{out}: cannot be written: {files.reason(error)} and continue with --resume, or give"
            " another --out"
        ) from error


def _pieces_after_pruning(
    options: TrainOptions, store: FeatureStore, collator: Collator, say: Any
) -> list[str] | None:
    """Return the pieces that `--prune-to` retains, or None for all."""
    if options.prune_to is None:
        return None
    try:
        other = student_tokenizer(options.prune_to, store)
    except UserError as error:
        raise UserError(str(error).replace("--vocab", "--prune-to", 1)) from error
    if fewer := fewer_pieces(options.prune_to, len(other)):
        say(f"prune to  {fewer.replace('--vocab', '--prune-to')}")
    own = collator.student_tokenizer
    retained = shared_pieces(own, other, options.prune_to)
    say(
        f"prune to  {len(retained):,} of {len(own):,} pieces, after the training; its figures are"
        " of the student with all of them"
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


def prepare(options: TrainOptions, store: FeatureStore, *others: FeatureStore) -> Prepared:
    """Make a student with initial weights and its collator, and describe how the weights were
    initialised.

    Vocabulary and initial weights are from the first store; the max length depends on all stores.
    Raises UserError if the store lacks what they need, or if temporary files cannot be written.
    """
    return _prepare(plan_of(options, store, *others))


def _prepare(plan: TrainPlan) -> Prepared:
    try:
        return _prepared(plan)
    except OSError as error:
        raise UserError(
            f"{plan.options.out_folder()}: the student cannot be prepared: {files.reason(error)}"
            f" (temporary files are in {tempfile.gettempdir()})"
        ) from error


def _prepared(plan: TrainPlan) -> Prepared:
    options, store = plan.options, plan.store
    pattern, others = plan.shape.pattern, plan.stores[1:]
    tokenizer = student_tokenizer(options.vocab, store, others=others, pattern=pattern)
    fit_tokenizer(tokenizer, plan)
    how = resolved_start(options.init, plan.shape, store)
    # So that each process of a training draws the same initial weights.
    torch.manual_seed(options.seed)
    student = make_student(
        options.student,
        tokenizer,
        _positions(plan) or tokenizer.model_max_length,
        task=store.task,
        **_network(plan),
        **_copied_settings(how, plan),
    )
    if store.features.task and "config.json" in store.teacher_files():
        _take_activation(student, store)
    compares_maps = any(term.loss.student == "maps" for term in plan.terms)
    # Fused kernels do not return attention maps, and their backward pass is slow on a CPU.
    if has_attention(student) and (compares_maps or options.device == "cpu"):
        student.set_attn_implementation("eager")
    collator = make_collator(plan, store, tokenizer)
    fewer = fewer_pieces(options.vocab, len(tokenizer))
    changed = check_spelling(collator, store, options.vocab) if plan.shape.causal else ""
    start = initialise(student, how, store, collator.vocabulary)
    # After the start, which finds weights by their names: peft renames those of linear layers.
    if options.lora:
        add_low_rank(student, options.lora)
        start.append(f"low-rank changes of rank {options.lora} of the linear layers are trained")
    if options.word_vectors:
        at_random = start == [RANDOM]
        path = Path(options.word_vectors)
        start.append(set_word_vectors(student, tokenizer, path, others=at_random))
    return student, collator, [line for line in (fewer, changed, *start) if line]


def _take_activation(student: PreTrainedModel, store: FeatureStore) -> None:
    """Copy the teacher's activation for CrossEncoder to the student's config.

    Raises UserError unless it is a class of torch.nn: CrossEncoder imports and calls any name.
    """
    config = store.teacher_settings("config.json")
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        if name in config:
            setattr(student.config, name, config[name])
    declared_activation(str(store.path), student.config)


def fit_tokenizer(tokenizer: Any, plan: TrainPlan) -> None:
    """Set the max length of a student's tokenizer, and the outputs that it needs for text pairs,
    also in the saved files.

    Raises UserError for a tokenizer without a token between two texts.
    """
    if plan.store.features.separator is not None:
        check_pair_form(tokenizer, plan.options.vocab, plan.store)
        types = ["token_type_ids"] if plan.shape.token_types else []
        names = ["input_ids", *types, "attention_mask"]
        # `save_pretrained` writes only the attributes that are named in `init_kwargs`.
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    longest = max(each.features.max_length for each in plan.stores)
    length, most = plan.options.max_length or default_max_length(longest), _positions(plan)
    if most is not None and plan.options.max_length and length > most:
        raise UserError(
            f"--max-length {length}: the student has {most} positions; give --max-length {most}"
        )
    tokenizer.model_max_length = length if most is None else min(length, most)
    name = "tokenizer_config.json"
    held = name in plan.store.teacher_files()
    read = plan.store.teacher_settings(name) if held else {}
    # The teacher has read the end of a long text, so the student must read the same end.
    if read.get("truncation_side") == "left":
        tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = "left"


def _positions(plan: TrainPlan) -> int | None:
    """Return the positions of the model that a student continues, or None for another start."""
    if not plan.options.init.startswith(FOLDER):
        return None
    config, folder = start_config(plan.options.init, plan.store)
    found = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(found, int) or found < 1:
        raise UserError(
            f"{folder}: its config.json gives {found!r:.40} positions; save the model there again"
        )
    return found


def _network(plan: TrainPlan) -> dict[str, Any]:
    """Return the options that become settings of the student's config."""
    names = scoped(TrainOptions, NETWORK)
    if plan.shape.kind != "bilstm":
        names -= scoped(TrainOptions, BILSTM)
    found = {name: getattr(plan.options, name) for name in names}
    if plan.options.projection == "student":
        found["projection_size"] = plan.store.features.width
    return {name: value for name, value in found.items() if value is not None}


def _copied_settings(how: str, plan: TrainPlan) -> dict[str, Any]:
    """Return the settings of a teacher's config on which a decoder's copied layers depend.

    how: the resolved `--init`.
    """
    if not plan.shape.causal or not copies_layers(how):
        return {}
    return copied_settings(start_config(how, plan.store)[0])


def make_collator(plan: TrainPlan, store: FeatureStore, tokenizer: Any) -> Collator:
    """Make the collator of `store`, one of the plan's stores, for a student with `tokenizer`."""
    spec = store.features.logits
    return Collator(
        tokenizer,
        store.teacher_file("tokenizer.json").decode(),
        plan.options.batch_plan(plan.options.terms(output_kind_of(store))),
        max_length=tokenizer.model_max_length,
        head=store.head() if spec and spec.tier == "head" else None,
        exact=plan.options.combine != "outputs",  # the mean of several is over the best pieces
        store=store,
    )


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
            parameters = save_embedder(student, head, plan.terms, stores, longest, new)
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
    card = model_card(report, hub_id(stores[0]), student, head is not None)
    files.write(out / "README.md", card.encode())
    # Last, as its `result` is what marks a student as finished.
    files.write(out / SETTINGS, json.dumps(report, indent=1).encode())
    remove_checkpoints(out / "checkpoints")
    return report
