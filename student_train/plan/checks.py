"""Checks of a training against its stores, before any work is done. Each error is one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.data.blocks import has_gold, output_kind_of, view_of
from teachonce.student_train.losses.registry import LOSSES, features_read, losses_for, named
from teachonce.student_train.model.freezing import check_frozen, check_rank, check_unfrozen
from teachonce.student_train.model.start_checks import check_start_source, check_word_vectors
from teachonce.student_train.plan.several_stores import check_combinable, check_same_labels
from teachonce.student_train.plan.train_plan import Stage, StoreSplit, TrainPlan, plan_of
from teachonce.student_train.plan.vector_space import check_similarity
from teachonce.student_train.settings.option_values import stays_in_memory
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError


def checked_plan(options: TrainOptions, store: FeatureStore, *others: FeatureStore) -> TrainPlan:
    """Plan a training and compare its options with the open stores. Raises UserError for every
    mismatch that is visible without reading features; see also `check_memory`."""
    plan = plan_of(options, store, *others)
    _check_start(plan)
    _check_needs(plan)
    check_unfrozen(options)
    check_rank(options)
    _check_vectors(plan)
    for source in plan.sources:
        check_same_labels(store, source.store)
        if options.projection == "student" and source.store.features.width != store.features.width:
            raise UserError(
                f"--projection student: the teacher of {source.store.path} has hidden size"
                f" {source.store.features.width}, the teacher of {store.path}"
                f" {store.features.width}, and a student has one projection; choose another"
                " --projection, or one --store"
            )
        _check_stages(plan, source)
        if options.combine == "outputs":
            check_combinable(plan.terms, store, source.store)
    if options.combine == "outputs" and not others:
        raise UserError(
            f"--combine outputs: needs several stores, and {store.path} is the only one; give"
            " --store twice or more"
        )
    return plan


def check_memory(plan: TrainPlan) -> None:
    """Raise UserError if memory does not suffice for `--cache`. The plan's options must be
    resolved."""
    if not stays_in_memory(plan.options.cache):
        return
    import torch

    from teachonce.student_train.data.cache import check_cache

    kinds = set(features_read(term.loss for term in plan.terms))
    needs = [(store, kinds, _views(plan, store)) for store in plan.stores]
    check_cache(plan.options.cache, torch.device(plan.options.device), needs)


def _check_start(plan: TrainPlan) -> None:
    """Check the layers, the store or the folder of --init, and the file of --word-vectors."""
    options, store = plan.options, plan.store
    check_start_source(options, store)
    if options.word_vectors:
        check_word_vectors(Path(options.word_vectors))
    if options.init.startswith("layers:") and "@" in options.init:
        # Imported here: most trainings are checked without torch, which takes seconds to import.
        from teachonce.student_train.model.start import other_model

        other_model(options.init, store, options.shape.causal)


def _views(plan: TrainPlan, store: FeatureStore) -> set[int]:
    """Return all views that the epochs of a plan may read."""
    requested = {stage.options.view for stage in plan.stages}
    epochs = range(store.features.views)
    return {view_of(epoch, store.features, view) for view in requested for epoch in epochs}


def _check_needs(plan: TrainPlan) -> None:
    """Check that the stores have what a recipe needs."""
    # The checks of losses do not cover this: with other features of the same kind the training
    # would run, but would not be the recipe's.
    options, stores, needs = plan.options, plan.stores, plan.options.needs
    read = features_read(term.loss for term in plan.terms)
    count = needs.get("stores", 1)
    if len(stores) < count:
        raise UserError(
            f"--recipe {needs['recipe']} needs {count} teachers; give --store {count} times"
        )
    if needs.get("model") and options.init.startswith("layers:") and "@" not in options.init:
        raise UserError(
            f"--recipe {needs['recipe']}: its student starts from layers of the original teacher,"
            " but the stores are of students of that teacher; give --init"
            f" {options.init}@DIR, where DIR is the folder of that teacher"
        )
    if "tied" in needs and options.init == "mixed-vocab":
        _check_tied(needs, stores[0])
    for store in stores:
        if needs.get("masked") and options.view is None and store.features.views == 1:
            raise UserError(
                f"--recipe {needs['recipe']} reads masked views, and {store.path} has none; dump"
                " with --views 2 or more, or train on the unmasked view (--view 0)"
            )
        for kind, stored in (
            ("hidden", store.features.hidden),
            ("attention", store.features.attention),
        ):
            required = needs.get(kind, "")
            sort, _, number = required.partition(":")
            first = {"groups": f"groups{number}.", "mean": f"mean{number}"}.get(sort, sort)
            if required and kind in read and not any(name.startswith(first) for name in stored):
                which = " (a single layer, I its number)" if required == "layer:I" else ""
                raise UserError(
                    f"--recipe {needs['recipe']} needs {kind} {required}{which}, and {store.path}"
                    f" has {', '.join(stored) or 'none'}; dump with --{kind} {required}"
                )


def _check_tied(needs: Mapping[str, Any], store: FeatureStore) -> None:
    mixed = store.identity.get("mixed_vocab") or {}
    if mixed.get("tie", False) != needs["tied"]:
        with_it, way = ("without", "with") if needs["tied"] else ("with", "without")
        raise UserError(
            f"--recipe {needs['recipe']}: the embeddings of {store.path} were trained {with_it}"
            f" --tie, but the recipe needs them {way} it; make a store with teacher-dump"
            f" mixed-vocab --recipe {needs['recipe']}"
        )


def _check_vectors(plan: TrainPlan) -> None:
    """Raise UserError for a loss of text vectors if `--combine outputs` is given, if the stores'
    vectors differ in size, or if `check_similarity` refuses a store."""
    options, stores = plan.options, plan.stores
    losses = [term.loss for term in plan.terms if term.loss.of_vectors]
    first = stores[0].features.embedding
    if not losses or first is None:
        return
    if options.combine == "outputs":
        raise UserError(
            f"--combine outputs: --loss {losses[0].name} compares with the vectors of one teacher;"
            " give --combine losses, or one --store"
        )
    for store in stores:
        check_similarity(store)
    for other in stores[1:]:
        spec = other.features.embedding
        if spec is not None and spec.width != first.width:
            raise UserError(
                f"--loss {losses[0].name}: the vectors of {other.path} have size {spec.width}, the"
                f" vectors of {stores[0].path} {first.width}, and a student has one vector per"
                " text; train a student for each store"
            )


def _check_stages(plan: TrainPlan, source: StoreSplit) -> None:
    held_out = source.held_out
    for number, stage in enumerate(plan.stages, 1):
        try:
            check_frozen(stage.options)
            _check_trains(plan, stage)
            _check_static(stage)
            _check_served(stage, source.store, held_out)
            _check_projection(stage.options, source.store)
            _check_groups(stage, source.store)
            for batch in stage.batches:
                # Called for its error: perhaps no sequence is left.
                source.blocks(batch)
        except UserError as error:
            if not plan.options.stages:
                raise
            raise UserError(f"stage {number}: {error}") from error


def _check_trains(plan: TrainPlan, stage: Stage) -> None:
    """Raise UserError for a stage whose losses are all 0."""
    losses = {term.name for term in stage.terms}
    if losses and losses <= plan.zero_losses():
        raise UserError(
            f"--loss {min(losses)}: trains nothing with --vocab {plan.options.vocab}, because no"
            " token begins inside one of the teacher's; add next to --loss, or give a vocabulary of"
            " its own, such as --vocab 8k"
        )


def check_batches(plan: TrainPlan) -> None:
    """Check the batches' options that do not depend on the student. Raises UserError if a store
    lacks a feature or label that they need."""
    _check_vectors(plan)
    _check_trains(plan, plan.stages[0])
    for source in plan.sources:
        _check_served(plan.stages[0], source.store, source.held_out)


def _check_served(stage: Stage, store: FeatureStore, held_out: Array) -> None:
    """Raise UserError unless a store has the task, features and view that a stage reads."""
    _check_task(stage, store, held_out)
    _check_features(stage, store)
    _check_texts(stage)
    _check_view(stage, store)


def _check_task(stage: Stage, store: FeatureStore, held_out: Array) -> None:
    options = stage.options
    task, name = store.task, store.path
    if task and options.shape.causal:
        raise UserError(
            f"--student {options.student}: a decoder has no head for {task.kind}, which the teacher"
            f" of {name} is for; choose HxLxA, bert:HxLxA or bilstm:E,H"
        )
    valid = {loss.name for loss in losses_for(output_kind_of(store), options.loss)}
    wrong = sorted(options.loss.keys() - valid)
    if wrong and task and any(loss.head == "task" for loss in named(wrong[:1])):
        _refuse_answers(wrong[0], task, name)
    if wrong and task:
        of_task = dict.fromkeys(loss.name for loss in LOSSES if loss.head == "task")
        raise UserError(
            f"--loss {wrong[0]}: the teacher of {name} is for {task.kind}, so its student has no"
            f" masked-LM head; use {', '.join(of_task)} or losses of hidden states"
        )
    if wrong:
        raise UserError(
            f"--loss {wrong[0]}: the teacher of {name} has no task head; dump a fine-tuned teacher"
            " (downstream --save, teacher-dump --head classification|tagging)"
        )
    of_gold = [term.name for term in stage.terms if term.loss.of_gold]
    of_labels = options.data in ("labelled", "balanced")
    labelled = [f"--data {options.data}"] if of_labels else []
    readers = [*labelled, *(f"--loss {name}" for name in of_gold)]
    if readers and not has_gold(store):
        raise UserError(
            f"{readers[0]}: {name} has no gold labels; dump labelled text (teacher-dump"
            " --label-column, or a .tsv of words and tags), or choose other losses"
        )
    judged = options.judged_by()
    if judged and of_gold and not has_gold(store, held_out):
        raise UserError(
            f"{judged[0]}: no held-out sequence of {name} ({options.held_out:g} of all) has a gold"
            " label; hold out more (--held-out), or dump more labels"
        )


def _refuse_answers(loss: str, task: TaskSpec, name: str) -> None:
    """Raise UserError for a loss whose formula is for other task outputs."""
    valid = [entry.name for entry in losses_for(task.output_kind) if entry.head == "task"]
    kind = f"gives {counted(len(task.labels), 'number')} (regression)"
    if task.is_score:
        kind = "gives one score and has no classes"
    if task.output_kind == "several labels":
        kind = "gives a text several labels at once, and gold labels of such a task are not stored"
    raise UserError(
        f"--loss {loss}: the teacher of {name} {kind}; use {', '.join(valid)} or losses of hidden"
        " states"
    )


def _check_static(stage: Stage) -> None:
    """Raise UserError for losses of tokens if the student has no layers."""
    other = [term.name for term in stage.terms if not term.loss.of_vectors]
    if stage.options.shape.kind == "static" and other:
        valid = ", ".join(loss.name for loss in LOSSES if loss.of_vectors)
        raise UserError(
            f"--loss {other[0]}: --student {stage.options.student} has no layers and no heads, and"
            f" is trained on text vectors only; use {valid} with a store of vectors (teacher-dump"
            " --head embedding), or choose HxLxA"
        )


def _check_features(stage: Stage, store: FeatureStore) -> None:
    features, where = store.features, store.path
    has = {  # `_check_task` has checked losses of a task
        "logits": (features.logits, "logits", "them (--logits) with a teacher that has a head"),
        "hidden": (features.hidden, "hidden states", "them (--hidden)"),
        "attention": (features.attention, "attention maps", "them (--attention)"),
        "embedding": (features.embedding, "text vectors", "them (--head embedding)"),
    }
    spec = features.logits
    for loss in (term.loss for term in stage.terms):
        stored, label, flags = has.get(loss.feature or "", (True, "", ""))
        if not stored:
            raise UserError(
                f"--loss {loss.name}: {where} has no {label}; dump {flags}, or choose another loss"
            )
        if spec and loss.feature == "logits" and spec.next_token != loss.of_next:
            raise UserError(_of_another_token(loss.name, where, spec.next_token))
        if spec and spec.tier == "sample" and loss.teacher in ("logits", "shared"):
            raise UserError(
                f"--loss {loss.name}: {where} has random draws, which have no logits; use kl"
            )
        if loss.teacher == "observed" and spec and not spec.has_text:
            raise UserError(
                f"--loss {loss.name}: {where} lacks the log-probabilities of the next tokens"
                " (logits.observed), as imports and older dumps may; use kl-next, or make the store"
                " with teacher-dump"
            )
        if spec and spec.tier == "sample" and not loss.of_draws:
            raise UserError(
                f"--loss {loss.name}: {where} has random draws, which give a probability of zero to"
                " most pieces that a student predicts; use kl-next, or dump with --logits topk:K"
            )


def _check_texts(stage: Stage) -> None:
    """Raise UserError for batches of one text and a loss that compares the texts of a batch."""
    between_texts = [term.name for term in stage.terms if term.loss.of_pairs]
    if stage.options.batch_texts == 1 and between_texts:
        raise UserError(
            f"--batch-texts 1: --loss {between_texts[0]} compares the texts of a batch; give 2 or"
            " more, or choose other losses"
        )


def _of_another_token(loss: str, where: str | Path, next_token: bool) -> str:
    if next_token:
        return (
            f"--loss {loss}: {where} has next-token logits of a causal teacher, which only decoders"
            " are trained on; use --student llama:HxLxA with kl-next, or mlm and hidden"
        )
    return (
        f"--loss {loss}: {where} has the logits of a masked LM, and decoders are trained on"
        " next-token logits; dump a causal teacher (--head causal), or use next and hidden"
    )


def _check_projection(options: TrainOptions, store: FeatureStore) -> None:
    hidden = store.features.hidden
    if options.projection == "student" and len(hidden) > 1:
        raise UserError(
            f"--projection student: {store.path} has the hidden states {', '.join(hidden)}, and a"
            " student has one projection; dump with one (--hidden layer:L)"
        )


def _check_view(stage: Stage, store: FeatureStore) -> None:
    options = stage.options
    unmasked = view_of(0, store.features, options.view) == 0
    if options.mask_words == "rare" and not unmasked:
        raise UserError(
            f"--mask-words rare: a masked view of {store.path} has the masks of its dump"
            " (teacher-dump --mask-words rare); use --view 0"
        )
    if options.max_masks is not None and not unmasked:
        raise UserError(
            f"--max-masks {options.max_masks}: a masked view of {store.path} has the masks of its"
            " dump; use --view 0"
        )
    second = [
        term.alignment
        for term in stage.terms
        if term.loss.student == "pieces" and ALIGNMENTS[term.alignment].second_input
    ]
    if options.targets == "masked" and second and unmasked:
        raise UserError(
            f"--targets masked: under --align {second[0]} the student reads view 0 unmasked;"
            " use a store with masked views (teacher-dump --views 2), or --targets all"
        )
    if options.view is not None and not 0 <= options.view < store.features.views:
        raise UserError(
            f"--view {options.view}: {store.path} has views 0 to {store.features.views - 1}; give"
            " one of these"
        )


def _check_groups(stage: Stage, store: FeatureStore) -> None:
    """Raise UserError if a student has no attention maps to compare, or layers that cannot be
    divided into the groups whose means are stored."""
    options, shape = stage.options, stage.options.shape
    losses = [term.loss for term in stage.terms]
    mapped = [loss.name for loss in losses if loss.student == "maps"]
    if mapped and not shape.heads:
        raise UserError(
            f"--loss {mapped[0]}: --student {options.student} has no attention maps; choose HxLxA,"
            " or another loss"
        )
    compared: list[str] = []
    if any(loss.student == "runs" for loss in losses):
        compared += store.features.hidden
        if "mean0" in store.features.hidden and shape.embeddings != shape.width:
            raise UserError(
                f"--student {options.student}: {store.path} has means that include the embeddings"
                f" (mean:0), and the student's embedding size {shape.embeddings} is not its hidden"
                f" size {shape.width}; dump with --hidden mean, or choose a student with equal"
                " sizes"
            )
    if mapped:
        compared += store.features.attention
    for name in compared:
        if name.startswith("groups") and shape.layers % (count := int(name[6:].split(".")[0])):
            raise UserError(
                f"--student {options.student}: {store.path} has {name}, and {shape.layers} student"
                f" layers cannot be divided into {count} groups; choose a multiple of {count}"
                " layers"
            )
