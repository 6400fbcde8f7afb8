"""One student from start to finish: options in, a transformers folder out."""

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
from teachonce.student_train.data.vocabularies import check_vocabulary
from teachonce.student_train.model.any_student import has_attention
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.student_train.model.start import RANDOM, initialise
from teachonce.student_train.model.student_tokenizer import (
    check_pair_form,
    default_max_length,
    student_tokenizer,
)
from teachonce.student_train.model.word_vectors import set_word_vectors
from teachonce.student_train.output.card import environment, hub_id, model_card
from teachonce.student_train.output.embedder import save_embedder
from teachonce.student_train.output.report import SETTINGS, check_out, go_on, tokenizer_hash
from teachonce.student_train.plan.checks import check_memory, checked_plan
from teachonce.student_train.plan.train_plan import Stores, TrainPlan, plan_of
from teachonce.student_train.settings.option_fields import BILSTM, NETWORK
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import Trained, Watch, train_plan
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.options import scoped
from teachonce.support.redaction import redacted
from teachonce.training.checkpoint import remove_checkpoints
from teachonce.training.ranks import ALONE, Ranks, joined
from teachonce.training.wordpiece import fewer_pieces

Prepared = tuple[PreTrainedModel, Collator, list[str]]
"""A student at its start, its collator, and lines on where it starts from; see `prepare`."""


def run(
    options: TrainOptions, *, resume: bool = False, say: Any = lambda line: None
) -> dict[str, Any]:
    """Train the student that `options` ask for and write it to its folder; return its
    training.json.

    A student that these options finished before is left as it is. `say` receives, in a line each,
    what a user should know. Raises UserError for bad input, before anything is written.
    """
    with open_stores(options) as stores:
        return run_plan(checked_plan(options, *stores).resolved(), resume=resume, say=say)


def run_plan(plan: TrainPlan, *, resume: bool, say: Any) -> dict[str, Any]:
    """Train the student of a plan, which is resolved and checked; see `run`."""
    with joined(plan.options.device) as ranks:
        say = say if ranks.lead else lambda line: None
        check_memory(plan)
        ranks.check(plan.options.accumulate)
        if ranks.size > 1:
            say(f"processes {ranks.size}, among which the batches of each step are shared out")
        return train_student(plan, resume=resume, say=say, ranks=ranks)


@contextmanager
def open_stores(options: TrainOptions) -> Iterator[list[FeatureStore]]:
    """Open the stores that a student is trained on, until the end of the block.

    Raises StoreError where one cannot be read, or the tokenizers installed here would give other
    tokens than those stored.
    """
    paths = (options.store, *options.others)
    with closing(Stores(paths, options.allow_partial, options.cache)) as stores:
        for store in stores.opened:
            check_tokenizers(store)
        yield stores.opened


def check_tokenizers(store: FeatureStore) -> None:
    """Raise StoreError where the tokenizers installed here would give other tokens than those that
    a store holds."""
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
    """Train the student of a plan, which is resolved and checked; see `run`.

    `on_validation` receives the step and figures of each validation, and may raise to end the
    training. `prepared` is what `prepare` returned for the plan, if that was done already. Of
    several `ranks` the first writes.
    """
    options, stores = plan.options, plan.stores
    store = stores[0]
    out = options.out_folder()
    files.check_utf8(out)
    begun: dict[str, Any] = {
        "settings": redacted(options.describing()),
        "store": _origin(store),
        "others": [_origin(other) for other in stores[1:]],
        "environments": [environment(options.device, ranks.size)],
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with closing(Lease(out)) if ranks.lead else nullcontext():  # two would mix checkpoints
            before: dict[str, Any] | None = ranks.agreed(
                check_out(out, begun, resume) if ranks.lead else None
            )
            if before is not None and "result" in before:
                say(f"finished  {out} was trained to its end; there is nothing to do")
                return before
            student, collator, begun["start"] = prepared or _prepare(plan)
            begun["tokenizer"] = tokenizer_hash(collator.student_tokenizer)
            kept = _kept_of(options, store, collator, say)
            if before is not None:
                go_on(out, before, begun, say)
            for line in begun["start"]:
                say(f"start     {line}")
            if cut := collator.cut_line():
                say(f"start     {cut}")
            of_texts = any(term.loss.of_text for term in plan.terms)
            if not of_texts and any(each.features.embedding for each in stores):
                say("losses    none of them learns from the vectors of texts in the store")
            if ranks.lead:
                for each in stores:
                    record_copy(each.path, each.manifest, "student", out)
                out.mkdir(exist_ok=True)
                files.write(out / SETTINGS, json.dumps(begun, indent=1).encode())
            others = [make_collator(plan, each, collator.student_tokenizer) for each in stores[1:]]
            trained = train_plan(
                plan,
                student,
                [collator, *others],
                out,
                resume=resume,
                watch=Watch(on_validation=on_validation, say=say, say_progress=True),
                ranks=ranks,
            )
            report: dict[str, Any] = ranks.agreed(
                _finish(plan, begun, trained, collator, kept) if ranks.lead else None
            )
            return report
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{out}: cannot be written: {files.reason(error)} and go on with --resume, or give"
            " another --out"
        ) from error


def _kept_of(
    options: TrainOptions, store: FeatureStore, collator: Collator, say: Any
) -> list[str] | None:
    """Return the pieces that the finished student keeps, or None for all."""
    if options.prune_to is None:
        return None
    try:
        other = student_tokenizer(options.prune_to, store)
    except UserError as error:
        raise UserError(str(error).replace("--vocab", "--prune-to", 1)) from error
    if fewer := fewer_pieces(options.prune_to, len(other)):
        say(f"prune to  {fewer.replace('--vocab', '--prune-to')}")
    return shared_pieces(collator.student_tokenizer, other, options.prune_to)


def _origin(store: FeatureStore) -> dict[str, Any]:
    return {
        "identity": store.identity,
        "features": store.features.to_json(),
        "content": store.manifest.content(),
        "state": store.meta["state"],
        "software": store.meta["software"],
    }


def prepare(options: TrainOptions, store: FeatureStore, *others: FeatureStore) -> Prepared:
    """Make the student at its start, the collator that feeds it, and a few lines on where it starts
    from.

    The first store decides vocabulary and start, all stores the longest input. Raises UserError
    where the store cannot give them, or temporary files cannot be written.
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
    tokenizer = student_tokenizer(options.vocab, store, others=plan.stores[1:])
    fit_tokenizer(tokenizer, plan)
    torch.manual_seed(options.seed)
    student = make_student(
        options.student,
        tokenizer,
        tokenizer.model_max_length,
        task=store.task,
        **_network(plan),
    )
    if store.features.task and "config.json" in store.teacher_files():
        _take_activation(student, store)
    compares_maps = any(term.loss.student == "maps" for term in plan.terms)
    # The fused kernels never hold the probabilities, and their backward pass is slow on a CPU.
    if has_attention(student) and (compares_maps or options.device == "cpu"):
        student.set_attn_implementation("eager")
    collator = make_collator(plan, store, tokenizer)
    fewer = fewer_pieces(options.vocab, len(tokenizer))
    start = initialise(student, options.init, store, collator.vocabulary)
    if options.word_vectors:
        at_random = start == [RANDOM]
        path = Path(options.word_vectors)
        start.append(set_word_vectors(student, tokenizer, path, others=at_random))
    return student, collator, [fewer, *start] if fewer else start


def _take_activation(student: PreTrainedModel, store: FeatureStore) -> None:
    """Have CrossEncoder put behind the student's outputs what it puts behind the teacher's.

    Raises UserError for no class of torch.nn: CrossEncoder would import and call what it names.
    """
    config = store.teacher_settings("config.json")
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        if name in config:
            setattr(student.config, name, config[name])
    declared_activation(str(store.path), student.config)


def fit_tokenizer(tokenizer: Any, plan: TrainPlan) -> None:
    """Set the longest input of a student's tokenizer, and what it returns for pairs of texts; also
    when it is loaded again.

    Raises UserError for a tokenizer that puts no token between two texts.
    """
    if plan.store.features.separator is not None:
        check_pair_form(tokenizer, plan.options.vocab, plan.store)
        types = ["token_type_ids"] if plan.shape.token_types else []
        names = ["input_ids", *types, "attention_mask"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    longest = max(each.features.max_length for each in plan.stores)
    tokenizer.model_max_length = plan.options.max_length or default_max_length(longest)
    name = "tokenizer_config.json"
    held = name in plan.store.teacher_files()
    read = plan.store.teacher_settings(name) if held else {}
    if read.get("truncation_side") == "left":
        tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = "left"


def _network(plan: TrainPlan) -> dict[str, Any]:
    """Return what goes to the config of the student's kind."""
    names = scoped(TrainOptions, NETWORK)
    if plan.shape.kind != "bilstm":
        names -= scoped(TrainOptions, BILSTM)
    found = {name: getattr(plan.options, name) for name in names}
    if plan.options.projection == "student":
        found["projection_size"] = plan.store.features.width
    return {name: value for name, value in found.items() if value is not None}


def make_collator(plan: TrainPlan, store: FeatureStore, tokenizer: Any) -> Collator:
    """Make the collator of `store`, one of the plan's, for a student with `tokenizer`."""
    spec = store.features.logits
    return Collator(
        tokenizer,
        store.teacher_file("tokenizer.json").decode(),
        plan.options.batch_plan(plan.options.terms(output_kind_of(store))),
        max_length=tokenizer.model_max_length,
        head=store.head() if spec and spec.tier == "head" else None,
        store=store,
    )


def _finish(
    plan: TrainPlan,
    begun: dict[str, Any],
    trained: Trained,
    collator: Collator,
    kept: list[str] | None,
) -> dict[str, Any]:
    options, stores = plan.options, plan.stores
    out = options.out_folder()
    student, tokenizer = trained.student.eval(), collator.student_tokenizer
    student.cpu()
    head = trained.vector_head
    if kept is not None:
        begun = {**begun, "pruned": {"pieces": len(kept), "of": len(tokenizer)}}
        student, tokenizer = pruned(student, tokenizer, kept)
    transformers_logging.disable_progress_bar()
    with files.staged_files(out) as new:
        if head is None:
            student.save_pretrained(new)
            parameters = student.num_parameters()
        else:
            longest = tokenizer.model_max_length
            parameters = save_embedder(student, head, plan.terms, stores, longest, new)
        save_tokenizer(tokenizer, new)
        files.open_weights(new)
    result = {
        **trained.validation,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 1),
        "parameters": parameters,
    }
    report = {**begun, "result": result}
    card = model_card(report, hub_id(stores[0]), student, head is not None)
    files.write(out / "README.md", card.encode())
    files.write(out / SETTINGS, json.dumps(report, indent=1).encode())
    remove_checkpoints(out / "checkpoints")
    return report
