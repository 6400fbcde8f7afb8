"""Does distillation help? Equal students, data and steps; only losses, alignment and start differ.

    python -m benchmarks.distillation_helps --store en.zarr --work /tmp/arms
    python -m benchmarks.distillation_helps --store en.zarr --work /tmp/arms --report

The store needs two views (view 1 masked), hidden states and logits. Each arm and seed is a student;
those that are finished in --work are not trained again: the work can be stopped and cut in pieces.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.report import SHARED, publish, table
from downstream.probe import linear_probe
from downstream.tagging import TaggingSettings, fine_tune
from store import FeatureStore, open_store
from student_train.data import split_blocks
from student_train.evaluate import evaluate
from student_train.options import ALIGNMENTS, TrainOptions, parse_losses
from student_train.run import make_collator, prepare
from student_train.student import Distiller
from student_train.trainer import train
from student_train.vocabulary import student_tokenizer

EVAL_TOKENS = 4096
MASKED = {"view": 1, "targets": "masked"}  # the teacher's logits where it saw a mask itself
ARMS: Mapping[str, dict[str, Any]] = {
    "mlm": {"loss": "mlm=1"},
    **{f"{a} hidden": {"loss": "mlm=1,hidden=30", "align": a} for a in ALIGNMENTS},
    **{f"{a} kl": {"loss": "mlm=1,kl=1", "align": a, **MASKED} for a in ALIGNMENTS},
    **{
        f"{a} kl hidden": {"loss": "mlm=1,kl=1,hidden=30", "align": a, **MASKED} for a in ALIGNMENTS
    },
    "random start mlm": {"loss": "mlm=1", "init": "random"},
    "random start span hidden": {"loss": "mlm=1,hidden=30", "init": "random"},
    "cut start mlm": {"loss": "mlm=1", "init": "teacher"},
    "cut start span hidden": {"loss": "mlm=1,hidden=30", "init": "teacher"},
}
MEASURES = {
    "nats_per_character": "MLM nats/character",
    "mlm": "MLM nats/token",
    "agreement": "agreement with the teacher",
    "kl": "KL to the teacher",
    "probe": "probe accuracy (POS)",
    "tuned": "fine-tuned accuracy (POS)",
}


@torch.no_grad()
def agreement(distiller: Distiller, store: FeatureStore, collator: Any, blocks: Any) -> float:
    """Share of held-out masked words (view 1, one teacher token) where the best pieces agree."""
    same = count = 0
    for number, raw in enumerate(
        store.stream(0, 0, EVAL_TOKENS, view=1, blocks=blocks, features=["logits"], shuffle=False)
    ):
        batch = collator(raw, 1, (0, 0, number, 1)).to(distiller.student.device)
        wanted = batch.distillation
        hidden = torch.isin(wanted.logit_runs.member, batch.masked)
        states = distiller.encode(batch.inputs).last[wanted.logit_runs.member[hidden]]
        targets = wanted.logits
        best = targets.logprobs.masked_fill(~targets.valid, -torch.inf).argmax(1, keepdim=True)
        told = targets.ids.gather(1, best)[hidden, 0]
        same += int((distiller.logits(states).argmax(1) == told).sum())
        count += len(told)
    return same / max(1, count)


def judge(
    folder: Path, student: Any, tokenizer: Any, options: TrainOptions, store: FeatureStore
) -> dict[str, float]:
    """All measures of one finished student."""
    _, held_out = split_blocks(store, options.held_out)
    scores = {}
    for view, loss in ((0, {"mlm": 1.0}), (1, {"kl": 1.0})):
        judging = replace(
            options,
            align="span",
            targets="all",
            pool=None,
            loss=loss,
            view=view,
            batch_tokens=EVAL_TOKENS,
        )
        distiller = Distiller(student, judging, (), store.features.width).eval()
        collator = make_collator(judging, store, tokenizer)
        found = evaluate(distiller, store, collator, held_out, judging)
        if view == 0:
            scores["mlm"] = found["valid_mlm"]
            scores["nats_per_character"] = found["valid_mlm_per_character"]
        else:
            scores["kl"] = found["valid_kl"]
            scores["agreement"] = agreement(distiller, store, collator, held_out)
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return scores | tagging(folder, options.seed)


def tagging(folder: Path, seed: int) -> dict[str, float]:
    """Accuracy of a linear probe and of a short fine-tuning on English part-of-speech tags."""
    train_file, dev_file = (SHARED / "data/pos" / f"en_ewt.{part}.tsv" for part in ("train", "dev"))
    probe = linear_probe(str(folder), train_file, dev_file, train_sentences=600, dev_sentences=400)
    settings = TaggingSettings(epochs=2, lr=5e-4, seeds=1, seed=seed, limit=1500)
    tuned = fine_tune("pos", str(folder), train_file, dev_file, None, settings, say=lambda _: None)
    return {"probe": probe["accuracy"], "tuned": tuned["mean"]["dev"]["accuracy"]}


def folder_of(work: Path, arm: str, seed: int) -> Path:
    """Where the student of an arm and a seed lies."""
    return work / f"{arm.replace(' ', '-')}-{seed}"


def one_student(arm: str, seed: int, base: TrainOptions, store: FeatureStore, work: Path) -> None:
    """Train and judge, and keep the scores; nothing if they are there."""
    folder = folder_of(work, arm, seed)
    scores = folder / "scores.json"
    if scores.exists():
        return
    changes = dict(ARMS[arm])
    changes["loss"] = parse_losses((changes["loss"],))
    options = replace(base, seed=seed, **{"view": 0, **changes}).resolved()
    options.check()
    began = time.perf_counter()
    student, collator = prepare(options, store)
    trained = train(store, student, collator, options)
    folder.mkdir(parents=True, exist_ok=True)
    found = judge(folder, trained.student.eval(), collator.student_tokenizer, options, store)
    found |= {"tokens": trained.tokens, "seconds": trained.seconds}
    scores.write_text(json.dumps({**found, "settings": options.describing()}))
    print(f"{arm} seed {seed}: {time.perf_counter() - began:.0f} s {json.dumps(found)}", flush=True)


def report(work: Path, settings: str) -> None:
    """Mean and deviation over seeds of everything that is finished."""
    rows = []
    for arm in ARMS:
        paths = [folder_of(work, arm, seed) / "scores.json" for seed in range(10)]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
        if found:
            values = ([scores[measure] for scores in found] for measure in MEASURES)
            rows.append([arm, len(found), *map(mean_and_deviation, values)])
    publish("Distillation helps", settings, table(["arm", "seeds", *MEASURES.values()], rows))


def mean_and_deviation(values: list[float]) -> str:
    """`mean ± sample deviation`, without the latter for a single value."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


@click.command()
@click.option("--store", "path", required=True)
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--student", default="128x2x2")
@click.option("--steps", default=1200)
@click.option("--batch-tokens", default=1024)
@click.option("--lr", default=2e-3)
@click.option("--seeds", default="0,1,2")
@click.option("--arms", default=",".join(ARMS), help="Names as in the table.")
@click.option("--precision", default="bf16")
@click.option("--report", "only_report", is_flag=True)
def main(path: str, work: Path, arms: str, seeds: str, only_report: bool, **settings: Any) -> None:
    """Train the arms that are not finished and print the table."""
    store = open_store(path)
    work.mkdir(parents=True, exist_ok=True)
    vocabulary = work / "vocabulary"
    if not vocabulary.exists():
        student_tokenizer("5k", store).save_pretrained(vocabulary)
    base = TrainOptions(
        store=path, vocab=str(vocabulary), held_out=0.04, eval_every=10**9, **settings
    )
    if not only_report:
        for seed in map(int, seeds.split(",")):
            for arm in arms.split(","):
                one_student(arm, seed, base, store, work)
    identity = Path(store.identity["teacher"]["id"]).name
    report(
        work,
        f"`python -m benchmarks.distillation_helps`; teacher {identity}, {store.meta['tokens']:,}"
        f" tokens of English novels, student {base.student}, 5k WordPiece, {base.steps} steps of"
        f" {base.batch_tokens} teacher tokens, lr {base.lr:g}, {base.precision}; start SVD unless"
        " named; ± sample deviation over seeds.",
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
