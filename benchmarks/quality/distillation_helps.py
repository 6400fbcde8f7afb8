"""Does distillation help? Students that differ only in losses, alignment and start.

    python -m benchmarks.quality.distillation_helps --store en.zarr --work /tmp/arms

The store needs two views (view 1 masked), hidden states and logits. Each arm, learning rate and
seed is a student; those that are finished in --work are not trained again: the work can be stopped
and cut in pieces (--arms, --seeds).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.common.results import SHARED, mean_and_deviation, publish, table
from benchmarks.quality.judge import MEASURES, Tags, judge, tagging
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS, parse_losses
from teachonce.student_train.train.student_training import train
from teachonce.support.console import command_errors
from teachonce.support.differences import describe_changes
from teachonce.support.errors import UserError

SCORES = "scores.json"
EWT = SHARED / "data/pos/en_ewt"  # English Web Treebank, universal part-of-speech tags
MASKED = {"view": 1, "targets": "masked"}  # the teacher's logits where its own input is masked
ARMS: Mapping[str, dict[str, Any]] = {
    "mlm": {"loss": "mlm=1"},
    **{f"{a} hidden": {"loss": "mlm=1,hidden=30", "align": a} for a in ALIGNMENTS},
    **{f"{a} kl": {"loss": "mlm=1,kl=1", "align": a, **MASKED} for a in ALIGNMENTS},
    **{
        f"{a} kl hidden": {"loss": "mlm=1,kl=1,hidden=30", "align": a, **MASKED} for a in ALIGNMENTS
    },
    "span kl at all tokens": {"loss": "mlm=1,kl=1", "view": 0, "targets": "all"},
    "random start mlm": {"loss": "mlm=1", "init": "random"},
    "random start span hidden": {"loss": "mlm=1,hidden=30", "init": "random"},
    "cut start mlm": {"loss": "mlm=1", "init": "teacher"},
    "cut start span hidden": {"loss": "mlm=1,hidden=30", "init": "teacher"},
}
TUNED_AS = {  # the loss decides the rate, more than the alignment or the start
    **{
        f"{a} {losses}": f"span {losses}"
        for a in ALIGNMENTS
        for losses in ("hidden", "kl", "kl hidden")
    },
    **{f"{start} start span hidden": "span hidden" for start in ("random", "cut")},
}


def folder_of(work: Path, arm: str, lr: float, seed: int) -> Path:
    """Return the folder of the student of an arm, a learning rate and a seed."""
    return work / f"{arm.replace(' ', '-')}-lr{lr:g}-{seed}"


def one_student(arm: str, base: TrainOptions, store: FeatureStore, work: Path) -> Path:
    """Train and judge the student of an arm, write its scores.json, and return its folder.

    An existing student is not trained again. Raises UserError if it has other settings.
    """
    changes = dict(ARMS[arm])
    changes["loss"] = parse_losses((changes["loss"],))
    options = replace(base, **{"view": 0, **changes}).resolved()
    folder = folder_of(work, arm, options.resolved_lr, options.seed)
    settings = json.loads(json.dumps(options.describing()))
    if (folder / SCORES).exists():
        if differences := describe_changes(scores_of(folder)["settings"], settings):
            raise UserError(
                f"{folder}: trained with other settings ({differences}); give another --work"
            )
        return folder
    student, collator, _ = prepare(options, store)
    trained = train(store, student, collator, options)
    student.train(False)
    student.save_pretrained(folder)
    collator.student_tokenizer.save_pretrained(folder)
    scores: dict[str, Any] = judge(student, collator.student_tokenizer, options, store)
    scores |= {"tokens": trained.tokens, "seconds": trained.seconds, "settings": settings}
    (folder / SCORES).write_text(json.dumps(scores))
    printed = " ".join(f"{key} {value:.3f}" for key, value in scores.items() if key != "settings")
    print(f"{arm} lr {options.resolved_lr:g} seed {options.seed}: {printed}", flush=True)
    return folder


def scores_of(folder: Path) -> dict[str, Any]:
    """Read the scores that a student has so far."""
    scores: dict[str, Any] = json.loads((folder / SCORES).read_text())
    return scores


def with_tags(folder: Path, tags: Tags) -> dict[str, Any]:
    """Return all scores of a student; missing scores of the tagging task are added."""
    scores = scores_of(folder)
    if not set(MEASURES) <= set(scores):
        scores |= tagging(folder, tags, scores["settings"]["seed"])
        (folder / SCORES).write_text(json.dumps(scores))
        print(f"{folder.name}: tuned {scores['tuned']:.3f}", flush=True)
    return scores


def best_rate(arm: str, base: TrainOptions, store: FeatureStore, work: Path) -> float:
    """Find the learning rate with the lowest held-out loss at the first seed, by steps of two."""

    @functools.cache
    def loss(power: int) -> float:
        options = replace(base, lr=base.resolved_lr * 2.0**power)
        return float(scores_of(one_student(TUNED_AS.get(arm, arm), options, store, work))["mlm"])

    power = 0
    direction = 1 if loss(1) < loss(0) else -1
    while loss(power + direction) < loss(power):
        power += direction
    return base.resolved_lr * 2.0**power


def report(title: str, arm_scores: dict[str, list[dict[str, Any]]], settings: str) -> None:
    """Publish the mean and standard deviation over seeds of every arm."""
    rows = []
    for arm, scores in arm_scores.items():
        values = ([of_seed[measure] for of_seed in scores] for measure in MEASURES)
        rate = scores[0]["settings"]["lr"]
        rows.append([arm, f"{rate:g}", len(scores), *map(mean_and_deviation, values)])
    publish(title, settings, table(["arm", "lr", "seeds", *MEASURES.values()], rows))


@click.command()
@click.option("--store", "path", required=True)
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--student", default="bert:128x2x2")
@click.option("--steps", default=1200)
@click.option("--batch-tokens", default=1024)
@click.option("--lr", default=1e-3, help="Where the search for each arm's learning rate begins.")
@click.option("--seeds", default="0,1,2")
@click.option("--rate", multiple=True, help="ARM=LR: known, and not searched for.")
@click.option("--arms", default=",".join(ARMS), help="Names as in the table.")
@click.option("--precision", default="bf16")
@click.option(
    "--tags",
    nargs=2,
    type=click.Path(path_type=Path),
    default=(f"{EWT}.train.tsv", f"{EWT}.dev.tsv"),
)
@click.option("--title", default="Distillation helps", help="Of the section of RESULTS.md.")
@command_errors
def main(
    path: str,
    work: Path,
    arms: str,
    seeds: str,
    rate: tuple[str, ...],
    tags: Tags,
    title: str,
    **settings: Any,
) -> None:
    """Train the arms that are not finished and print the table."""
    store = open_store(path)
    work.mkdir(parents=True, exist_ok=True)
    vocabulary = work / "vocabulary"
    if not vocabulary.exists():
        student_tokenizer("5k", store).save_pretrained(vocabulary)
    base = TrainOptions(
        init="svd", store=path, vocab=str(vocabulary), held_out=0.04, eval_every=10**9, **settings
    )
    rates = {arm: float(lr) for arm, _, lr in (word.partition("=") for word in rate)}
    scores: dict[str, list[dict[str, Any]]] = {}
    for arm in arms.split(","):
        tuned = replace(base, lr=rates.get(arm) or best_rate(arm, base, store, work))
        runs = (replace(tuned, seed=int(seed)) for seed in seeds.split(","))
        folders = [one_student(arm, options, store, work) for options in runs]
        scores[arm] = [with_tags(folder, tags) for folder in folders]
    identity = Path(store.identity["teacher"]["id"]).name
    report(
        title,
        scores,
        f"`python -m benchmarks.quality.distillation_helps`. Teacher: {identity}; text:"
        f" {store.meta['tokens']:,} tokens of English novels. Student: {base.student}, 5k"
        f" WordPiece, {base.steps} steps of {base.batch_tokens} teacher tokens, {base.precision}."
        " Each arm uses the learning rate that gave it the lowest MLM loss at seed 0; rates were"
        f" searched in factors of two{', except ' + ', '.join(rate) if rate else ''}. The `match`"
        " and `reduce` arms, and the other starts of an arm with a teacher, use the rate of the"
        " `span` arm. The start is SVD unless the arm names another start. ± is the sample"
        " deviation over seeds.",
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
