"""Reads the task and the labels of a fine-tuned head from the config of its checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from teachonce.checkpoints.sentence_settings import declared_activation
from teachonce.store import TaskSpec
from teachonce.store.format.features import PROBLEM_TYPES, SEVERAL_LABELS
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line

ONE_LABEL = "single_label_classification"
"""The `problem_type` of transformers that a TaskSpec has as None."""
PAIRS = "text_pairs"
"""The field of config.json that records whether a classifier was trained on pairs of texts."""


def trained_on_pairs(config: Any) -> bool | None:
    """Return whether a classifier was trained on pairs of texts; None if its config does not record
    this, as a config that transformers wrote does not."""
    pairs = getattr(config, PAIRS, None)
    return pairs if isinstance(pairs, bool) else None


def task_of(config: Any, head: str | None, name: str) -> TaskSpec | None:
    """Read the task and labels of a fine-tuned head from its config; None for LM heads.

    Raises UserError for labels with equal names, for an unknown `problem_type`, and for a tagger
    with the `problem_type` of a classifier.
    """
    if head not in ("classification", "tagging"):
        return None
    # Classifiers of decoder families find the last token of a padded text by this id.
    if head == "classification" and config.pad_token_id is None:
        raise UserError(f"{name}: its config.json has no pad_token_id; set it to the tokenizer's")
    names = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
    _check_numbers(config, name)
    if len(set(names)) < len(names):
        raise UserError(
            f"{name}: two labels have the same name in id2label of its config.json; rename one"
        )
    later = getattr(config, "later_label", None) if head == "tagging" else None
    if later is not None and later not in names:
        raise UserError(
            f"{name}: later_label of its config.json is {later!r}, which is none of its labels,"
            f" {', '.join(names)[:200]}; remove it, or name the label of a word's later pieces"
        )
    return TaskSpec(head, tuple(names), later, problem_type=_problem_type(config, head, name))


def score_activation(name: str, config: Any, task: TaskSpec | None) -> str:
    """Return the activation of a reranker, a class of torch.nn, as CrossEncoder applies it; "" for
    other checkpoints. Raises UserError like `declared_activation`."""
    if task is None or not task.is_score or task.problem_type:
        return ""
    # Sigmoid is CrossEncoder's default for one output.
    return (declared_activation(name, config) or "Sigmoid").rpartition(".")[2]


def activated(logits: Array, name: str) -> Array:
    """Apply an activation to logits: `name` is a class of torch.nn, or "" for no activation. Raises
    UserError if the class cannot be applied to a score."""
    if name in ("", "Identity"):
        return logits
    if name == "Sigmoid":
        return sigmoid(logits)
    import torch

    # export.json and config.json are untrusted: only a module class of torch.nn is called.
    activation = getattr(torch.nn, name, None)
    if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
        raise UserError(f"activation {name!r:.40}: expected a class of torch.nn; export it again")
    try:
        values: Array = activation()(torch.as_tensor(logits)).numpy()
        if values.shape != logits.shape:
            raise ValueError(f"it makes {values.shape} of {logits.shape}")
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        # raised by classes that are not activations, such as Linear or LSTM
        raise UserError(
            f"activation {name!r:.40}: cannot be applied to a score ({first_line(error)}); correct"
            " activation_fn in config.json, or export the student again"
        ) from None
    return values


def sigmoid(logits: Array) -> Array:
    """Return the logistic function, float64."""
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def _problem_type(config: Any, head: str, name: str) -> str | None:
    """Return the `problem_type` of a TaskSpec, from config.json or the CrossEncoder's activation;
    None if neither names one.

    Raises UserError for an unknown problem_type, and for a tagger with one of PROBLEM_TYPES.
    """
    problem = config.problem_type
    if problem not in (None, ONE_LABEL, *PROBLEM_TYPES):
        raise UserError(
            f"{name}: problem_type in its config.json is {problem!r:.60}, expected {ONE_LABEL},"
            f" {' or '.join(PROBLEM_TYPES)}; correct it, or remove it if the labels exclude each"
            " other"
        )
    problem = None if problem == ONE_LABEL else problem
    if head == "tagging":
        if problem is not None:
            raise UserError(
                f"{name}: problem_type in its config.json is {problem}, but a tagger gives each"
                " token one tag (in transformers, too); remove problem_type from config.json if"
                " that is right, or use another checkpoint"
            )
        return None
    # CrossEncoder ignores problem_type. Its trainer writes a sigmoid for several labels of a text.
    sigmoid = str(declared_activation(name, config)).endswith(".Sigmoid")
    if problem is None and config.num_labels > 1 and sigmoid:
        return SEVERAL_LABELS
    return problem


def _check_numbers(config: Any, name: str) -> None:
    """Raise UserError if id2label has gaps, or if label2id contradicts it."""
    numbers = sorted(config.id2label)
    if numbers != list(range(config.num_labels)):
        raise UserError(
            f"{name}: id2label of its config.json has the numbers {str(numbers)[:60]}, expected 0"
            f" to {config.num_labels - 1}; name every label"
        )
    other = getattr(config, "label2id", None) or {}
    wrong = [n for n, label in config.id2label.items() if other.get(label, n) != n]
    if wrong and set(other) == set(config.id2label.values()):
        label = config.id2label[wrong[0]]
        raise UserError(
            f"{name}: {label!r:.60} is number {wrong[0]} in id2label of its config.json and"
            f" {other[label]!r:.20} in label2id; correct the wrong one"
        )
