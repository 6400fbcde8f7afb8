"""The score of a model without training, from the labels of the test files alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.reproduce.costs import given
from teachonce.downstream.cli import main as downstream
from teachonce.downstream.early_checks import read_options
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.tagging import PartsOfSpeech

Shares = Mapping[str, float]
"""The share of each label among those of a test file."""


def chance(words: Sequence[str], figure: str) -> float:
    """Return the score of a task, given as words of `downstream`, that needs no training.

    It is the better of two guesses: always the most frequent label, or a random label. It is 0 for
    entities, correlations and answers to questions. For several test files it is the mean.
    """
    if figure not in GUESSES:
        return 0.0
    options = read_options(given(downstream, [*words, "--model", "none", "--out", "none"]))
    kind = {"classify": Classify, "pos": PartsOfSpeech}.get(options.task or "")
    if kind is None:
        return 0.0
    task = kind(columns=options.columns())
    scores = []
    for path in options.test:
        labels = Counter(label for example in task.read(path) for label in task.labels_of(example))
        scores.append(GUESSES[figure]({name: n / labels.total() for name, n in labels.items()}))
    return statistics.mean(scores)


def is_trained(scores: Sequence[float], chance: float) -> bool:
    """Return whether the scores of some seeds exceed chance by more than their deviation."""
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return statistics.mean(scores) - spread > chance


def _accuracy(shares: Shares) -> float:
    return max(shares.values())


def _macro(shares: Shares) -> float:
    return max(statistics.mean(guess.values()) for guess in _label_f1(shares))


def _weighted(shares: Shares) -> float:
    return max(sum(shares[name] * f1 for name, f1 in guess.items()) for guess in _label_f1(shares))


def _last(shares: Shares) -> float:
    return max(guess[max(shares)] for guess in _label_f1(shares))


def _label_f1(shares: Shares) -> list[dict[str, float]]:
    """Return F1 of each label, for every constant answer and for random answers."""
    always = [
        {name: 2 * share / (1 + share) if name == answer else 0.0 for name, share in shares.items()}
        for answer in shares
    ]
    uniform = 1 / len(shares)
    at_random = {name: 2 * share * uniform / (share + uniform) for name, share in shares.items()}
    return [*always, at_random]


GUESSES: Mapping[str, Callable[[Shares], float]] = {
    "accuracy": _accuracy,
    "macro F1": _macro,
    "weighted F1": _weighted,
    "F1": _last,
}
"""By the name of a figure: what the better guess scores. Other figures are 0 without training."""
