"""Why the first layers of a teacher make a good student: all ways to cut layers out of one.

    python -m benchmarks.quality.first_layers --work DIR [--seeds N]

The SlovakBERT thesis (chapter 5) finds that a student of the first layers beats one of layers from
all of the teacher, and does not know why. Two explanations are told apart here. Layers that follow
one another in the teacher read in the student what they were trained on; after a gap they read
states that they have never seen. And low layers are of more use than high ones, whose work is to
predict the masked word. Every choice of layers is measured before any training; some are trained.
What is finished in --work is not made again.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer

from benchmarks.common.results import (
    NOVELS,
    RESULTS,
    SHARED,
    TEACHER,
    mean_and_deviation,
    publish,
    table,
)
from benchmarks.quality.distillation_helps import finished, scores_of
from teachonce.store import open_store
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

STS = SHARED / "data/sts/stsb_en.dev.tsv"
TRAINED = ((1, 2, 3), (1, 2, 4), (1, 3, 5), (1, 4, 6), (4, 5, 6))
LENGTHS = (32, 160)  # steps
LOSSES = {"kl": 0.625, "mlm": 0.25, "cosine": 0.125}  # Table 4.2, experiments 1 and 2
OF_CHOICES = (
    "layers", "strangeness of what its layers read", "masked LM, nats", "STS-B dev, Spearman",
)  # fmt: skip
MASKED, READ = 0.15, 20  # share of tokens; batches of 16 texts

Layers = tuple[int, ...]


class Cuts:
    """Measures students cut out of a teacher's layers, numbered from 1, without any training."""

    def __init__(self, model: str, texts: Sequence[str], pairs: Sequence[tuple[str, str, float]]):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForMaskedLM.from_pretrained(model, dtype=torch.float32).eval()
        self.layers = list(self.model.base_model.encoder.layer)
        self.batches = [self._batch(texts[i : i + 16]) for i in range(0, 16 * READ, 16)]
        generator = torch.Generator().manual_seed(0)
        self.masks = [
            (torch.rand(b["input_ids"].shape, generator=generator) < MASKED)
            & ~torch.isin(b["input_ids"], torch.tensor(self.tokenizer.all_special_ids))
            for b in self.batches
        ]
        self.pairs = pairs
        with torch.no_grad():
            self.read = [self._inputs(batch) for batch in self.batches]  # by the whole teacher

    def _batch(self, texts: Sequence[str]) -> dict[str, Tensor]:
        found = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        return dict(found)

    def _inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what each layer reads, [B,S,D] each, and in the end what the last one gives."""
        states: tuple[Tensor, ...] = self.model.base_model(
            **batch, output_hidden_states=True
        ).hidden_states
        return states

    @torch.no_grad()
    def figures(self, chosen: Layers) -> tuple[float, float, float]:
        """Return the strangeness of what the chosen layers read, the masked-LM loss in nats, and
        Spearman's correlation of the cosines of mean states with people's scores.

        Strangeness is the distance between what a layer reads here and what it read in the teacher,
        as a share of the latter's length: the mean over tokens and layers.
        """
        self.model.base_model.encoder.layer = nn.ModuleList(self.layers[i - 1] for i in chosen)
        strange, losses = [], []
        for batch, mask, read in zip(self.batches, self.masks, self.read, strict=True):
            present = batch["attention_mask"].bool()
            for own, layer in zip(self._inputs(batch), chosen, strict=False):
                here, there = own[present], read[layer - 1][present]
                strange.append(float(((here - there).norm(dim=1) / there.norm(dim=1)).mean()))
            hidden = batch["input_ids"].masked_fill(mask, self.tokenizer.mask_token_id)
            logits = self.model(**(batch | {"input_ids": hidden})).logits[mask]
            losses.append(float(functional.cross_entropy(logits, batch["input_ids"][mask])))
        return statistics.mean(strange), statistics.mean(losses), self.similarity()

    def shape(self, count: int) -> str:
        """Name a student as wide as the teacher, of so many layers."""
        own = self.model.config
        heads, inner = own.num_attention_heads, own.intermediate_size
        return f"{own.hidden_size}x{count}x{heads}x{inner}"

    def similarity(self) -> float:
        """Return Spearman's correlation of the cosines of mean states with people's scores."""
        return similarity(self.model, self.tokenizer, self.pairs)


@torch.no_grad()
def similarity(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str, float]]) -> float:
    """Return Spearman's correlation of the cosines of mean last states with people's scores."""
    cosines = list[float]()
    for i in range(0, len(pairs), 32):
        sides = []
        for side in (0, 1):
            texts = [pair[side] for pair in pairs[i : i + 32]]
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            present = batch["attention_mask"][:, :, None]
            states = model.base_model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).last_hidden_state
            sides.append((states * present).sum(dim=1) / present.sum(dim=1))
        cosines += functional.cosine_similarity(*sides).tolist()
    return float(spearmanr(cosines, [score for *_, score in pairs]).statistic)


def told(chosen: Layers) -> str:
    """Name a choice of layers."""
    return ",".join(map(str, chosen))


def choices_report(cuts: Cuts) -> str:
    """Tell the figures of every choice of two, three and four layers, and what goes together."""
    whole = tuple(range(1, len(cuts.layers) + 1))
    rows, lines = [[told(whole), *cuts.figures(whole)]], []
    for count in (2, 3, 4):
        found = {chosen: cuts.figures(chosen) for chosen in itertools.combinations(whole, count)}
        rows += [[told(chosen), *figures] for chosen, figures in found.items()]
        strange, nats, scores = zip(*found.values(), strict=True)
        depth = [statistics.mean(chosen) for chosen in found]
        together = [
            f"{name} {spearmanr(cause, effect).statistic:+.2f}"
            for effect, of in ((nats, "nats"), (scores, "STS"))
            for cause, name in (
                (strange, f"strangeness with {of}"), (depth, f"mean depth with {of}"),
            )
        ]  # fmt: skip
        ranks = sorted(found, key=lambda chosen: found[chosen][1])
        best = sorted(found, key=lambda chosen: -found[chosen][2])
        first = whole[:count]
        lines.append(
            f"- {count} of {len(whole)} layers, {len(found)} choices: the first ones are number"
            f" {ranks.index(first) + 1} by masked LM (best: {told(ranks[0])}) and"
            f" {best.index(first) + 1} by STS (best: {told(best[0])}). Rank correlations:"
            f" {', '.join(together)}."
        )
    return table(OF_CHOICES, rows) + "\n\n" + "\n".join(lines)


def trained_rows(base: TrainOptions, work: Path, seeds: int, cuts: Cuts) -> list[list[object]]:
    """Train and judge some choices of three layers; a line for each."""
    rows = []
    with closing(open_store(base.store)) as store:
        for chosen in TRAINED:
            cells: list[object] = []
            for steps in LENGTHS:
                asked = replace(base, init=f"layers:{told(chosen)}", steps=steps)
                name = f"{told(chosen)} steps {steps}"
                folders = [
                    finished(name, replace(asked, seed=seed), store, work) for seed in range(seeds)
                ]
                scores = []
                for folder in folders:
                    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
                    scores.append(similarity(model, cuts.tokenizer, cuts.pairs))
                nats = [scores_of(folder)["mlm"] for folder in folders]
                cells += [mean_and_deviation(nats), mean_and_deviation(scores)]
            rows.append([told(chosen), *cells])
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", default=str(TEACHER))
@click.option("--corpus", default=str(NOVELS))
@click.option("--tokens", default=60_000)
@click.option("--pairs", default=400, help="Of STS-B dev.")
@click.option("--seeds", type=click.IntRange(min=1), default=2)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path, model: str, corpus: str, tokens: int, pairs: int, seeds: int, results: Path
) -> None:
    """Measure every choice of a teacher's layers as it is, and some after training."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "store.zarr"
    lines = [line.split("\t") for line in STS.read_text("utf-8").splitlines()[1 : pairs + 1]]
    judged = [(line[0], line[1], float(line[2])) for line in lines]
    texts = [line for line in Path(corpus).read_text("utf-8").splitlines() if len(line) > 60]
    cuts = Cuts(model, texts[-16 * READ :], judged)
    if not (work / "dumped").exists():
        options: dict[str, Any] = {
            "views": 2, "logits": "topk:64", "attention": "none",
            "hidden": f"layer:{len(cuts.layers)}",
        }  # fmt: skip
        dump(DumpOptions(model=model, corpus=(corpus,), out=path, limit=tokens, **options))
        (work / "dumped").touch()
    base = TrainOptions(
        store=str(path), vocab="teacher", student=cuts.shape(len(TRAINED[0])), loss=LOSSES,
        view=1, held_out=0.04, batch_tokens=512, eval_every=10**9, precision="bf16",
    )  # fmt: skip
    of_choices = choices_report(cuts)
    of_trained = table(
        ("layers", *(f"{what} after {n} steps" for n in LENGTHS for what in ("nats", "STS"))),
        trained_rows(base, work, seeds, cuts),
    )
    about = (
        f"`python -m benchmarks.quality.first_layers --seeds {seeds}`; teacher {Path(model).name}"
        f" ({len(cuts.layers)} layers), {Path(corpus).name}; {16 * READ} texts and {len(judged)}"
        f" pairs of STS-B dev, mean states, no fine-tuning. Trained: {tokens:,} tokens, masked"
        " views, weights as in the thesis (KL .625, masked LM .25, cosine .125), 512 teacher tokens"
        " a step."
    )
    publish(
        "Why the first layers make a good student", about, f"{of_choices}\n\n{of_trained}", results
    )


if __name__ == "__main__":
    main()
