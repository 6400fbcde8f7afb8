"""What can be seen to be wrong with a training before any work is done, in one line each."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import torch

from store import FeatureStore
from student_train.data.cache import check_cache
from student_train.data.gold_labels import has_gold
from student_train.data.stream import split_blocks, view_of
from student_train.losses import formulas
from student_train.model.kinds import Shape, parse_student
from student_train.model.start import other_teacher
from student_train.settings.options import TrainOptions
from student_train.settings.stages import check_frozen, chosen_blocks, stages_of
from support.errors import UserError


def check(options: TrainOptions, store: FeatureStore, *others: FeatureStore) -> None:
    """Refuse, in one line, all that can be seen to be wrong before any work is done."""
    options.check()
    shape = parse_student(options.student)
    if (other := other_teacher(options.init, store)) is not None:
        other.close()
    _check_needs(options, store, *others)
    for each in (store, *others):
        _check_labels(store, each)
        _check_store(options, each, shape)
    kinds = set(formulas.features_of(options.losses(), store.features.task is not None))
    needs = [(each, kinds, _views(options, each)) for each in (store, *others)]
    check_cache(options.cache, torch.device(options.device), needs)


def _views(options: TrainOptions, store: FeatureStore) -> set[int]:
    """All that epochs may read."""
    return {view_of(epoch, store.features, options.view) for epoch in range(store.features.views)}


def _check_needs(options: TrainOptions, *stores: FeatureStore) -> None:
    """What the losses do not tell: a recipe would be another one with features of another kind."""
    needs, used = options.needs, options.losses()
    count = needs.get("stores", 1)
    if len(stores) < count:
        raise UserError(
            f"--recipe {needs['recipe']} learns from {count} teachers; give --store {count} times"
        )
    for store in stores:
        if needs.get("masked") and options.view is None and store.features.views == 1:
            raise UserError(
                f"--recipe {needs['recipe']} reads masked views, and {store.path} has none; dump"
                " with --views 2 or more, or let the teacher be unmasked (--view 0)"
            )
        for kind, there, names in (
            ("hidden", store.features.hidden, formulas.OF_HIDDEN),
            ("attention", store.features.attention, ("attention",)),
        ):
            wanted = needs.get(kind, "")
            sort, _, number = wanted.partition(":")
            first = f"groups{number}." if sort == "groups" else sort
            if wanted and used & set(names) and not any(name.startswith(first) for name in there):
                raise UserError(
                    f"--recipe {needs['recipe']} needs {kind} {wanted}, and {store.path} has"
                    f" {', '.join(there) or 'none'}; dump with --{kind} {wanted}, or give another"
                    " --loss"
                )


def _check_labels(first: FeatureStore, other: FeatureStore) -> None:
    one, two = first.features.task, other.features.task
    if one == two:
        return
    kinds = [task.kind if task else "masked LM" for task in (one, two)]
    if one is None or two is None or kinds[0] != kinds[1]:
        problem = f"is of another task, {kinds[1]}; that of {first.path} is of {kinds[0]}"
    elif one.labels == two.labels:
        here, there = (task.later_label or "no label" for task in (one, two))
        problem = f"has {there} for a word's later pieces, that of {first.path} {here}"
    else:
        pairs = zip_longest(one.labels, two.labels, fillvalue="none")
        number, (here, there) = next(
            (n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]
        )
        same = sorted(one.labels) == sorted(two.labels)
        what = "the labels in another order" if same else "other labels"
        problem = f"has {what} than that of {first.path}: number {number} is {there}, there {here}"
    raise UserError(
        f"--store {other.path}: its teacher {problem}; one student learns one task, with the same"
        " labels in the same order: dump teachers that were fine-tuned on the same labels"
        " (downstream --save sorts them), or train a student of each store"
    )


def _check_store(options: TrainOptions, store: FeatureStore, shape: Shape) -> None:
    blocks, held_out = split_blocks(store, options.held_out)
    for number, stage in enumerate(stages_of(options, shape.layers), 1):
        try:
            stage.check()
            check_frozen(stage, shape)
            _check_task(stage, store, held_out)
            _check_features(stage, store)
            _check_groups(stage, store, shape)
            chosen_blocks(store, blocks, stage)
        except UserError as error:
            if not options.stages:
                raise
            raise UserError(f"stage {number}: {error}") from error


def _check_task(options: TrainOptions, store: FeatureStore, held_out: np.ndarray) -> None:
    task, name = store.features.task, store.path
    wrong = sorted(options.loss.keys() & ({"mlm"} if task else {"ce", "log-odds"}))
    if wrong and task:
        raise UserError(
            f"--loss mlm: the teacher of {name} does {task.kind}, and so does its student, which"
            f" has no masked-LM head; use {', '.join(formulas.OF_TASK)} or losses of hidden states"
        )
    if wrong:
        raise UserError(
            f"--loss {wrong[0]}: the teacher of {name} does no task; dump with one that was"
            " fine-tuned (downstream --save, teacher-dump --head classification|tagging)"
        )
    wants = "--data labelled" if options.data == "labelled" else "--loss ce"
    if (options.data == "labelled" or "ce" in options.loss) and not has_gold(store):
        raise UserError(
            f"{wants}: {name} has no gold labels; dump labelled text (teacher-dump --label-column,"
            " or token/tag .tsv), or choose other losses"
        )
    judged = options.best or options.schedule == "plateau"
    if judged and "ce" in options.loss and not has_gold(store, held_out):
        raise UserError(
            f"{'--best' if options.best else '--schedule plateau'}: none of the sequences of {name}"
            f" that are held out ({options.held_out:g} of all) has a gold label to judge by; hold"
            " out more, or dump more labels"
        )


def _check_features(options: TrainOptions, store: FeatureStore) -> None:
    has = {
        "logits": (
            bool(store.features.logits or store.features.task),
            formulas.OF_LOGITS,
            "them (--logits) with a teacher that has a head",
        ),
        "hidden states": (bool(store.features.hidden), formulas.OF_HIDDEN, "them (--hidden)"),
        "attention maps": (bool(store.features.attention), ("attention",), "them (--attention)"),
    }
    for feature, (there, names, how) in has.items():
        for name in set(names) & set(options.loss):
            if not there:
                raise UserError(
                    f"--loss {name}: {store.path} holds no {feature}; dump {how}, or choose"
                    " another loss"
                )
    spec = store.features.logits
    for name in set(formulas.OF_LOGITS) & set(options.loss):
        if spec and spec.next_token:
            raise UserError(
                f"--loss {name}: the logits of {store.path} are of the token after each, as a"
                " causal teacher gives them, and students are masked LMs; use mlm and hidden"
            )
    if spec and spec.tier == "sample" and "logit" in options.loss:
        raise UserError("--loss logit: the store keeps random draws, which have no logits; use kl")
    plain = view_of(0, store.features, options.view) == 0
    if options.mask_words == "rare" and not plain:
        raise UserError(
            f"--mask-words rare: the masks of {store.path}'s view are those of its dump"
            " (teacher-dump --mask-words rare); use --view 0"
        )
    if options.targets == "masked" and options.align == "reduce" and plain:
        raise UserError(
            "--targets masked: under --align reduce the student reads view 0 unmasked; use a store"
            " with masked views (teacher-dump --views 2), or --targets all"
        )
    if options.view is not None and not 0 <= options.view < store.features.views:
        raise UserError(
            f"--view {options.view}: {store.path} has views 0 to {store.features.views - 1}"
        )


def _check_groups(options: TrainOptions, store: FeatureStore, shape: Shape) -> None:
    if "attention" in options.loss and not shape.heads:
        raise UserError(
            f"--loss attention: --student {options.student} has no attention maps; choose HxLxA, or"
            " another loss"
        )
    compared = [*(store.features.hidden if set(formulas.OF_RUNS) & set(options.loss) else ())]
    compared += store.features.attention if "attention" in options.loss else ()
    for name in compared:
        if name.startswith("groups") and shape.layers % int(name[6:].split(".")[0]):
            raise UserError(
                f"{name}: {shape.layers} student layers do not fall into as many groups; choose"
                " --student accordingly"
            )
