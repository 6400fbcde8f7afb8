"""Why KL over the pieces that two vocabularies share teaches little: what its targets say.

    python -m benchmarks.quality.shifted_vocabulary --work DIR [--seeds N] [--steps N]

Kolesnikova et al. 2022 (section 4.2) suspect that a piece has another meaning in a smaller
vocabulary, which splits more words: the teacher's `play` is a word, the student's begins `playing`,
too. They learn at visible tokens, where the teacher has read what it predicts. Both can be told
apart: at visible and at masked tokens, targets are measured, and students trained, with the
published KL (shared pieces, a match of tokens) and with ours, which adds up the teacher's pieces
that begin with the same student piece, and so moves with the vocabulary. Targets in the teacher's
own vocabulary, which has no shift, stand beside those in a small one. What is finished in --work is
not made again.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.common.results import NOVELS, RESULTS, TEACHER, mean_and_deviation, publish, table
from benchmarks.quality.distillation_helps import finished, scores_of
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.output.run import make_collator
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.evaluate import held_out
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

PLACES: dict[str, dict[str, Any]] = {
    "visible": {"view": 0, "targets": "unmasked"},
    "masked": {"view": 1, "targets": "masked"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "published KL": {"loss": {"mlm": 1.0, "kl-shared": 1.0}, "align": "match"},
    "our KL": {"loss": {"mlm": 1.0, "kl": 1.0}, "align": "span"},
}
BOTH: dict[str, Any] = {"loss": {"kl": 1.0, "kl-shared": 1.0}, "align": "kl=span,kl-shared=match"}
OF_TARGETS = (
    "vocabulary", "tokens", "learnt from (published)", "mass on the token itself (published)",
    "the same (ours)", "entropy, nats (published)", "distance of the two",
)  # fmt: skip
OF_STUDENTS = ("losses", "MLM nats/character", "against MLM alone")


def figures_of(batch: StudentBatch) -> dict[str, Tensor]:
    """Return figures of the runs that both alignments of a batch have targets for, [G] each, but
    for `matched`: the share of tokens that the published KL learns from."""
    ours, published = batch.aligned["span"], batch.aligned["match"]
    assert ours.logit_runs and ours.logits and published.logit_runs and published.shared
    tokens = batch.inputs.ids[batch.inputs.present].clone()
    tokens[batch.masked] = batch.labels
    in_ours = torch.isin(ours.logit_runs.member, published.logit_runs.member)
    in_published = torch.isin(published.logit_runs.member, ours.logit_runs.member)
    own = tokens[published.logit_runs.member[in_published]]
    shared = published.shared.logits[in_published].double().softmax(dim=1)
    shared_ids = published.shared.ids[in_published]
    kept = ours.logits.logprobs[in_ours].double().exp() * ours.logits.valid[in_ours]
    pieces = int(max(shared_ids.max(), ours.logits.ids.max(), tokens.max())) + 1
    dense = torch.zeros(len(own), pieces, dtype=torch.float64)
    dense_kept = dense.scatter_add(1, ours.logits.ids[in_ours], kept)
    named = torch.zeros(dense.shape, dtype=torch.bool).scatter(1, ours.logits.ids[in_ours], True)
    dense_shared = dense.scatter_add(1, shared_ids, shared)
    apart = ((dense_kept - dense_shared).abs() * named).sum(dim=1)
    unnamed = (1 - kept.sum(dim=1)) - (dense_shared * ~named).sum(dim=1)  # one more outcome
    return {
        "own": dense_shared.gather(1, own[:, None])[:, 0],
        "own of ours": dense_kept.gather(1, own[:, None])[:, 0],
        "entropy": -torch.special.xlogy(shared, shared).sum(dim=1),
        "distance": (apart + unnamed.abs()) / 2,
    }


@torch.no_grad()
def targets_row(store: FeatureStore, base: TrainOptions, place: str) -> list[object]:
    """Return the line of a vocabulary at visible or masked tokens: means over held-out text."""
    options = replace(base, **BOTH, **PLACES[place])
    collator = make_collator(options, store, student_tokenizer(options.vocab, store))
    found: dict[str, list[Tensor]] = {}
    learnt = tokens = 0
    for batch in held_out(store, collator, split_blocks(store, options.held_out)[1], options):
        for name, values in figures_of(batch).items():
            found.setdefault(name, []).append(values)
        runs = batch.aligned["match"].logit_runs
        assert runs is not None
        learnt += len(runs.begin)
        masked = len(batch.masked)
        tokens += masked if place == "masked" else batch.tokens - masked
    means = [float(torch.cat(values).mean()) for values in found.values()]
    return [Path(base.vocab).name, place, f"{learnt / tokens:.0%}", *means]


def students(store: FeatureStore, base: TrainOptions, work: Path, seeds: int) -> list[list[object]]:
    """Train and judge students; a line for each kind of losses."""
    arms: dict[str, dict[str, Any]] = {"MLM alone": {"loss": {"mlm": 1.0}, "view": 0}}
    for name, losses in LOSSES.items():
        arms |= {f"{name}, {place} tokens": losses | at for place, at in PLACES.items()}
    rows, alone = list[list[object]](), 0.0
    for name, changes in arms.items():
        options = replace(base, **changes)
        values = [
            scores_of(finished(name, replace(options, seed=seed), store, work))[
                "nats_per_character"
            ]
            for seed in range(seeds)
        ]
        alone = alone or statistics.mean(values)
        gain = statistics.mean(values) - alone
        rows.append([name, mean_and_deviation(values), f"{gain:+.3f}"])
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", default=str(TEACHER))
@click.option("--corpus", default=str(NOVELS))
@click.option("--tokens", default=200_000)
@click.option("--student", default="modernbert:128x2x2")
@click.option("--steps", default=400)
@click.option("--batch-tokens", default=512)
@click.option("--lr", default=1e-3)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path, model: str, corpus: str, tokens: int, seeds: int, results: Path, **settings: Any
) -> None:
    """Measure what both KLs teach at visible and masked tokens, and train students with them."""
    work.mkdir(parents=True, exist_ok=True)
    path, small = work / "store.zarr", work / "5k"
    if not (work / "dumped").exists():
        options: dict[str, Any] = {
            "views": 2,
            "logits": "head",
            "hidden": "none",
            "attention": "none",
        }
        dump(DumpOptions(model=model, corpus=(corpus,), out=path, limit=tokens, **options))
        (work / "dumped").touch()
    targets = list[list[object]]()
    with closing(open_store(path)) as store:
        if not small.exists():
            student_tokenizer("5k", store).save_pretrained(small)
        for vocab in ("teacher", str(small)):
            base = TrainOptions(
                store=str(path), vocab=vocab, init="svd", held_out=0.04, eval_every=10**9,
                precision="bf16", **settings,
            ).resolved()  # fmt: skip
            targets += [targets_row(store, base, place) for place in PLACES]
        trained = students(store, base, work, seeds)
    about = (
        f"`python -m benchmarks.quality.shifted_vocabulary --seeds {seeds}`; teacher"
        f" {Path(model).name}, {tokens:,} tokens of {Path(corpus).name}, students"
        f" {settings['student']}, {settings['steps']} steps of {settings['batch_tokens']} teacher"
        f" tokens, lr {settings['lr']:g}; all judged by the masked-LM loss of the same held-out"
        " text. Distance: half the sum of differences between the two targets of a token (0 to 1)."
    )
    body = table(OF_TARGETS, targets) + "\n\n" + table(OF_STUDENTS, trained)
    publish("Why KL of shared pieces teaches little", about, body, results)


if __name__ == "__main__":
    main()
