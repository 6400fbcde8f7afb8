"""Refusals of several stores that one student cannot be trained on, in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from teachonce.align import Vocabulary
from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.losses.registry import Term, features_of
from teachonce.support.errors import UserError

LOSSES = "give --combine losses, which takes any stores"


def check_labels(first: FeatureStore, other: FeatureStore) -> None:
    """Check that two stores have teachers of one task, with the same labels; raise UserError."""
    one, two = first.task, other.task
    if one == two:
        return
    kinds = [task.kind if task else "masked LM" for task in (one, two)]
    if one is None or two is None or kinds[0] != kinds[1]:
        problem = f"is of another task, {kinds[1]}; that of {first.path} is of {kinds[0]}"
    elif one.separator != two.separator:
        problem = f"classifies {_read(two)}, that of {first.path} {_read(one)}"
    elif one.problem_type != two.problem_type:
        there, here = (_problem(task) for task in (two, one))
        problem = f"is of problem_type {there}, that of {first.path} of {here}"
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


def _problem(task: TaskSpec) -> str:
    return task.problem_type or ("none" if task.is_score else "single_label_classification")


def _read(task: TaskSpec) -> str:
    return "pairs of texts" if task.separator else "single texts"


def check_joined(terms: Sequence[Term], first: FeatureStore, other: FeatureStore) -> None:
    """Check that two stores are dumps of one text, with the same tokens, parts and masks, whose
    features can be averaged; raise UserError."""
    _check_pieces(first, other)
    _check_texts(first, other)
    read = features_of(term.loss for term in terms)
    for kind in {"hidden", "attention"} & set(read):
        _check_states(kind, first, other)
    for each in (first, other):
        spec = each.features.logits
        if spec and spec.tier != "head" and any(term.loss.teacher == "shared" for term in terms):
            raise UserError(
                f"--combine outputs: --loss kl-shared of several teachers needs the logits of all"
                f" shared pieces, and {each.path} keeps some; dump with --logits head, or {LOSSES}"
            )
        if spec and spec.tier == "sample" and "logits" in read:
            raise UserError(
                f"--combine outputs: {each.path} keeps random draws, which have no geometric mean;"
                f" dump with --logits topk:K or head, or {LOSSES}"
            )


def _check_pieces(first: FeatureStore, other: FeatureStore) -> None:
    one, two = (
        Vocabulary.from_tokenizer_json(each.teacher_file("tokenizer.json").decode()).tokens
        for each in (first, other)
    )
    if one != two:
        raise UserError(
            f"--combine outputs: {other.path} has a teacher of {len(two)} pieces, other ones than"
            f" the {len(one)} of {first.path}: distributions over two vocabularies have no mean;"
            f" {LOSSES}"
        )


def _check_texts(first: FeatureStore, other: FeatureStore) -> None:
    one, two = (_texts(each) for each in (first, other))
    if one == two:
        return
    what = "other masked views"
    if _unmasked(one) != _unmasked(two):
        what = "other text, or parts of another size,"
    raise UserError(
        f"--combine outputs: {other.path} has {what} than {first.path}; dump both teachers with the"
        f" same corpus, lengths, views and seed, or {LOSSES}"
    )


def _texts(store: FeatureStore) -> dict[tuple[int, str], str]:
    """Return the checksums of the arrays of text, tokens and masks, by part and name."""
    return {
        (place, name): entry.sha256
        for place, part in enumerate(store.manifest.parts)
        for name, entry in part.arrays.items()
        if name.startswith(("sequence/", "text/", "token/")) or "/mask/" in name
    }


def _unmasked(texts: dict[tuple[int, str], str]) -> dict[tuple[int, str], str]:
    return {key: digest for key, digest in texts.items() if "/mask/" not in key[1]}


def _check_states(kind: str, first: FeatureStore, other: FeatureStore) -> None:
    told = []
    for each in (other, first):
        wide = f", {each.features.width} wide" if kind == "hidden" else ""
        told.append(f"{', '.join(getattr(each.features, kind)) or 'none'}{wide}")
    if told[0] != told[1]:
        raise UserError(
            f"--combine outputs: {other.path} has {kind} {told[0]}, and {first.path} {told[1]}:"
            f" these have no mean; dump both with the same --{kind}, or {LOSSES}"
        )
