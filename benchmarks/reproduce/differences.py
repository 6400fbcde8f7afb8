"""Our recipe with one difference at a time: which of them lies between it and a paper's best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.reproduce.source import OURS, Arm, Claim, Source
from teachonce.support.errors import UserError

DIFFERENCES: Mapping[str, tuple[str, ...]] = {
    "raw squared error": ("--loss", "mlm=1,hidden-raw-sum=0.2"),
    "MLM counts half": ("--loss", "mlm=0.5,hidden=30"),
    "states count a third": ("--loss", "mlm=1,hidden=10"),
    "states count three times": ("--loss", "mlm=1,hidden=90"),
    "with KL": ("--loss", "mlm=1,hidden=30,kl=1"),
    "with KL of shared pieces": (
        "--loss", "mlm=1,hidden=30,kl-shared=4", "--align", "hidden=span,kl-shared=match",
        "--targets", "unmasked",
    ),
    "match": ("--align", "match"),
    "reduce": ("--align", "reduce"),
    "frozen projection": ("--projection", "frozen"),
    "reduce, frozen projection": ("--align", "reduce", "--projection", "frozen"),
    "plateau schedule": ("--schedule", "plateau"),
    "rare words masked more often": ("--mask-words", "rare"),
    "means of layers": ("--init", "teacher"),
}  # fmt: skip
"""Words of `student-train`, each of a published arm. They stand in the place of ours, for every
source; a source has more of its own."""


def differing(source: Source) -> Source:
    """Return our arm of a source, and our arm with each difference.

    Raises UserError where our arm is no masked LM.
    """
    ours = source.arms.get(OURS, Arm(()))
    if not any(word.startswith("mlm=") for word in ours.words):
        raise UserError(f"--differences: are of masked LMs, not of {source.title}")
    arms = {
        f"{OURS}, {name}": replace(ours, words=_instead(ours, words))
        for name, words in {**DIFFERENCES, **source.differences}.items()
    }
    return replace(
        source,
        title=f"One difference at a time: {source.title}",
        arms={OURS: ours, **arms},
        claims=[Claim(f"{name} is better", "ours", name, OURS) for name in arms],
        published=None,
        models={},
        joined={},
    )


def _instead(arm: Arm, words: tuple[str, ...]) -> tuple[str, ...]:
    """Put options in the place of those of the same name, as losses that are told twice add up."""
    told = list(arm.words)
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option in told:
            told[told.index(option) + 1] = value
        else:
            told += [option, value]
    return tuple(told)
