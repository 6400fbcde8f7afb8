"""Decoder students: what losses and starts from a stored causal teacher are worth, in bits a byte.

    python -m benchmarks.quality.decoders --work DIR --model FOLDER [--store STORE] [--seeds N]

Students with a byte-level vocabulary of their own learn from a store of English novels and are
scored on a book that is not stored. Cross-entropy (next) is tuned over all rates; every other arm
over the rates next to the best of cross-entropy, at the first seed. What is finished in --work is
not trained again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common.results import NOVELS, RESULTS, mean_and_deviation, publish, table
from teachonce.downstream.lm.scoring import score_lm
from teachonce.downstream.settings import LmSettings
from teachonce.store import open_store
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.output.run import run
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

NEXT, BOTH = "next=1", "next=0.5,kl-next=0.5"
ARMS = {
    "random, next": {"init": "random", "loss": NEXT},
    "random, next + kl-next": {"init": "random", "loss": BOTH},
    "random, next + hidden": {"init": "random", "loss": f"{NEXT},hidden=0.3"},
    "random, default": {"init": "random"},
    "vocab, next": {"init": "vocab", "loss": NEXT},
    "vocab, next + kl-next": {"init": "vocab", "loss": BOTH},
    "vocab, next + reverse-kl": {"init": "vocab", "loss": "next=0.5,reverse-kl=0.5"},
    "vocab, next + hidden": {"init": "vocab", "loss": f"{NEXT},hidden=0.3"},
    "vocab, default": {"init": "vocab"},
    "cut, next": {"init": "teacher", "loss": NEXT},
    "cut, next + kl-next": {"init": "teacher", "loss": BOTH},
    "cut, default": {"init": "teacher"},
    "teacher's vocabulary, next": {"vocab": "teacher", "loss": NEXT},
    "teacher's vocabulary, default": {"vocab": "teacher"},
}
"""What an arm changes of the default. Its first word is its start: gains are over `next` of it.
A cut needs a student with the teacher's size of heads."""

BATCH = 2048  # teacher tokens
HELD_OUT = slice(10_900_000, 11_000_000)  # characters of a later book with a paragraph a line


def held_out(corpus: Path, work: Path) -> Path:
    """Write the paragraphs of a book that is not stored to a file of their own."""
    path, text = work / "held-out.txt", corpus.read_text("utf-8")[HELD_OUT]
    path.write_text(text[text.index("\n") + 1 : text.rindex("\n") + 1], "utf-8")
    return path


def score_text(model: Path, test: Path, precision: str = "fp32") -> dict[str, float]:
    """Score a decoder's folder on a file of documents, one a line."""
    found = score_lm(
        str(model), {"test": test}, LmSettings(precision=precision), say=lambda line: None
    )
    scores: dict[str, float] = found["mean"]["test"]
    return scores


class Bench:
    """Trains and scores the students of one store, shape, vocabulary and number of tokens."""

    def __init__(
        self, work: Path, store: Path, test: Path, common: dict[str, Any], rates: Sequence[float]
    ) -> None:
        self.work, self.store, self.test, self.common, self.rates = work, store, test, common, rates

    def scored(self, arm: str, rate: float, seed: int) -> dict[str, float]:
        """Train a student unless it is finished, and return its validation and test scores."""
        words = {**self.common, **ARMS[arm], "lr": rate, "seed": seed}
        name = [words["student"], words["vocab"], words["steps"], arm, f"{rate:g}", seed]
        out = self.work / "-".join(str(each).replace(" ", "") for each in name)
        given = {"store": (str(self.store),), "out": out, "cache": "ram", **words}
        if "loss" in words:
            given["loss"] = tuple(words["loss"].split(","))
        found = run(checked_from(given), resume=out.exists(), say=lambda line: None)["result"]
        scores = out / "lm.json"
        if not scores.exists():
            scores.write_text(json.dumps(score_text(out, self.test)))
        test = json.loads(scores.read_text())["bits_per_byte"]
        print(f"{out.name}: {found['valid_bits_per_byte']:.4f}, test {test:.4f}", flush=True)
        return {"valid": found["valid_bits_per_byte"], "test": test, "seconds": found["seconds"]}

    def best_rate(self, arm: str, rates: Sequence[float]) -> float:
        """Return the rate with the lowest validation at the first seed."""
        return min(rates, key=lambda rate: self.scored(arm, rate, 0)["valid"])

    def rows(self, arms: Sequence[str], seeds: int) -> list[list[object]]:
        """Train the arms; one row each. Each start's `next` comes before its other arms."""
        rows, best, plain = list[list[object]](), 0.0, dict[str, list[float]]()
        for arm in arms:
            near = [rate for rate in self.rates if best / 2 <= rate <= best * 2]
            rate = self.best_rate(arm, near or self.rates)
            scores = [self.scored(arm, rate, seed) for seed in range(seeds)]
            bits, start = [each["test"] for each in scores], arm.partition(",")[0]
            if arm.endswith(", next"):
                best, plain[start] = rate, bits
            gains = np.subtract(bits, plain[start]) if start in plain else []
            gain = f"{np.mean(gains):+.3f} ± {np.std(gains, ddof=1):.3f}" if len(gains) > 1 else ""
            seconds = np.median([each["seconds"] for each in scores])
            rows.append([arm, f"{rate:g}", mean_and_deviation(bits), gain, f"{seconds:.0f}"])
        return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", required=True, help="The teacher: a folder.")
@click.option("--store", type=click.Path(path_type=Path), help="Of that teacher, made before.")
@click.option("--corpus", type=click.Path(path_type=Path), default=NOVELS)
@click.option("--stored", default=420_000, help="Tokens of the store.")
@click.option("--student", default="llama:128x4x4x320")
@click.option("--vocab", default="4k")
@click.option("--tokens", default=500_000, help="Teacher tokens of a training.")
@click.option("--arms", default=";".join(ARMS), help="Names, divided by semicolons.")
@click.option("--rates", default="1e-3,2e-3,4e-3,8e-3", help="Of which each arm takes its best.")
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path,
    model: str,
    store: Path | None,
    corpus: Path,
    stored: int,
    student: str,
    vocab: str,
    tokens: int,
    arms: str,
    rates: str,
    seeds: int,
    results: Path,
) -> None:
    """Train and score the arms that are not finished, and print the table."""
    work.mkdir(parents=True, exist_ok=True)
    path = store or work / "store.zarr"
    if store is None:
        dump(DumpOptions(model, path, (str(corpus),), limit=stored, hidden="mean"), click.echo)
    steps = tokens // BATCH
    common = {
        "student": student,
        "vocab": vocab,
        "steps": steps,
        "batch_tokens": BATCH,
        "eval_every": steps,
    }
    every = [float(rate) for rate in rates.split(",")]
    bench = Bench(work, path, held_out(corpus, work), common, every)
    rows = bench.rows([each.strip() for each in arms.split(";")], seeds)
    own = score_text(Path(model), bench.test, "bf16")["bits_per_byte"]
    of_store = f"{open_store(path).meta['tokens']:,}"
    settings = (
        f"`python -m benchmarks.quality.decoders --student {student} --vocab {vocab} --tokens"
        f" {tokens} --seeds {seeds}`; teacher {Path(model).name} ({own:.3f} bits a byte),"
        f" {of_store} stored tokens of English novels, top 64 and mean states; {steps} steps of"
        f" {BATCH:,} teacher tokens; the rate is the best of {', '.join(f'{r:g}' for r in every)}"
        " at seed 0 by the store's held-out part (for arms after `next` of a start: the best and"
        f" its neighbours); bits a byte of {HELD_OUT.stop - HELD_OUT.start:,} characters of"
        " another book; gains are by seed, over `next` with the same start."
    )
    head = ("start, losses", "lr", "bits a byte", "minus `next`", "seconds")
    title = f"Decoder students: {student}, {vocab} pieces, {tokens / 1e6:g}M tokens"
    publish(title, settings, table(head, rows), results)


if __name__ == "__main__":
    main()
