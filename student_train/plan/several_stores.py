"""Checks that several stores can train one student. Each error is one line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.data.vocabularies import read_vocabulary
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.losses.registry import features_read
from teachonce.support.errors import UserError

LOSSES = "give --combine losses, which works with any stores"


def check_same_labels(first: FeatureStore, other: FeatureStore) -> None:
    """Raise UserError unless the teachers of two stores have the same task and labels."""
    one, two = first.task, other.task
    if one == two:
        return
    kinds = [task.kind if task else "masked LM" for task in (one, two)]
    if one is None or two is None or kinds[0] != kinds[1]:
        problem = f"is for {kinds[1]}, the teacher of {first.path} for {kinds[0]}"
    elif one.separator != two.separator:
        problem = f"classifies {_inputs(two)}, the teacher of {first.path} {_inputs(one)}"
    elif one.problem_type != two.problem_type:
        there, here = (_problem(task) for task in (two, one))
        problem = f"has problem_type {there}, the teacher of {first.path} {here}"
    elif one.labels == two.labels:
        here, there = (task.later_label or "no label" for task in (one, two))
        problem = f"has {there} for a word's later pieces, the teacher of {first.path} {here}"
    else:
        pairs = zip_longest(one.labels, two.labels, fillvalue="none")
        number, (here, there) = next(
            (n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]
        )
        same = sorted(one.labels) == sorted(two.labels)
        difference = "the labels in another order" if same else "other labels"
        problem = (
            f"has {difference} than the teacher of {first.path}: number {number} is {there} instead"
            f" of {here}"
        )
    raise UserError(
        f"--store {other.path}: its teacher {problem}; all stores of a student need the same task,"
        " with the same labels in the same order: dump teachers that were fine-tuned on the same"
        " labels (downstream --save sorts them), or train a student for each store"
    )


def _problem(task: TaskSpec) -> str:
    return task.problem_type or ("none" if task.is_score else "single_label_classification")


def _inputs(task: TaskSpec) -> str:
    return "pairs of texts" if task.separator else "single texts"


def check_combinable(terms: Sequence[Term], first: FeatureStore, other: FeatureStore) -> None:
    """Raise UserError unless two stores have the same text, tokens, parts and masked views, and the
    features that `terms` compare can be averaged."""
    _check_pieces(first, other)
    _check_texts(first, other)
    read = features_read(term.loss for term in terms)
    if chunked := [term.name for term in terms if term.loss.teacher == "observed"]:
        raise UserError(
            f"--combine outputs: --loss {chunked[0]} needs the probability of the text, which the"
            " mean of several teachers has only over their whole vocabulary; use kl-next, or"
            f" {LOSSES}"
        )
    for kind in {"hidden", "attention"} & set(read):
        _check_states(kind, first, other)
    for store in (first, other):
        spec = store.features.logits
        if spec and spec.tier != "head" and any(term.loss.teacher == "shared" for term in terms):
            raise UserError(
                f"--combine outputs: --loss kl-shared of several teachers needs the logits of all"
                f" shared pieces, and {store.path} has only some; dump with --logits head, or"
                f" {LOSSES}"
            )
        if spec and spec.tier == "sample" and "logits" in read:
            raise UserError(
                f"--combine outputs: {store.path} has random draws, which have no geometric mean;"
                f" dump with --logits topk:K or head, or {LOSSES}"
            )


def _check_pieces(first: FeatureStore, other: FeatureStore) -> None:
    one, two = (
        read_vocabulary(store.teacher_file("tokenizer.json").decode(), str(store.path)).tokens
        for store in (first, other)
    )
    if one != two:
        raise UserError(
            f"--combine outputs: the teacher of {other.path} has {len(two)} pieces that differ from"
            f" the {len(one)} of {first.path}: distributions over two vocabularies cannot be"
            f" averaged; {LOSSES}"
        )


def _check_texts(first: FeatureStore, other: FeatureStore) -> None:
    one, two = (_texts(store) for store in (first, other))
    if one == two:
        return
    difference = "other masked views"
    if _unmasked(one) != _unmasked(two):
        difference = "other text, or other part sizes,"
    raise UserError(
        f"--combine outputs: {other.path} has {difference} than {first.path}; dump both teachers"
        f" with the same corpus, lengths, views and seed, or {LOSSES}"
    )


def _texts(store: FeatureStore) -> dict[tuple[int, str], str]:
    """Return the checksums of the text, token and mask arrays, by part and name."""
    return {
        # Checksums of the manifests: neither text is read.
        (number, name): entry.sha256
        for number, part in enumerate(store.manifest.parts)
        for name, entry in part.arrays.items()
        if name.startswith(("sequence/", "text/", "token/")) or "/mask/" in name
    }


def _unmasked(texts: dict[tuple[int, str], str]) -> dict[tuple[int, str], str]:
    return {key: digest for key, digest in texts.items() if "/mask/" not in key[1]}


def _check_states(kind: str, first: FeatureStore, other: FeatureStore) -> None:
    states = []
    for store in (other, first):
        size = f" of size {store.features.width}" if kind == "hidden" else ""
        states.append(f"{', '.join(getattr(store.features, kind)) or 'none'}{size}")
    if states[0] != states[1]:
        raise UserError(
            f"--combine outputs: {other.path} has {kind} {states[0]}, and {first.path} {states[1]}:"
            f" these cannot be averaged; dump both with the same --{kind}, or {LOSSES}"
        )
