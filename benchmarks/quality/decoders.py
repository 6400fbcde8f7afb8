"""Decoder students: what losses and starts from a stored causal teacher are worth, in bits a byte.

    python -m benchmarks.quality.decoders --work DIR --model FOLDER [--store STORE] [--seeds N]

Students with a byte-level vocabulary of their own learn from a store of English novels. One book
that is not stored chooses the rates, another is scored. Cross-entropy (next) is tuned over all
rates; every other arm over the rates next to the best of cross-entropy, at the first seed. What is
finished in --work is not trained again, and the tables have all of it; --arms "" trains nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.common.results import NOVELS, mean_and_deviation, publish, results_option, table
from teachonce.downstream.lm.scoring import score_lm
from teachonce.downstream.settings import LmSettings
from teachonce.store import open_store
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.option_fields import loss_words
from teachonce.student_train.settings.terms import NEXT_LOSS
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

NEXT, BOTH = "next=1", "next=0.5,kl-next=0.5"
WITHOUT_INSIDE = "next=0.34,kl-next=0.33,alm=0.33"
STARTS = {"auto": "cut", "teacher": "cut", "vocab": "vocab", "random": "random"}
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
    "cut, next + reverse-kl": {"init": "teacher", "loss": "next=0.5,reverse-kl=0.5"},
    "cut, next + jsd": {"init": "teacher", "loss": "next=0.5,jsd:0.5=0.5"},
    "cut, next + alm": {"init": "teacher", "loss": "next=0.5,alm=0.5"},
    "cut, next + hidden": {"init": "teacher", "loss": f"{NEXT},hidden=0.3"},
    "cut, next + cosine": {"init": "teacher", "loss": f"{NEXT},cosine=0.3"},
    "cut, default without next-inside": {"init": "teacher", "loss": WITHOUT_INSIDE},
    "cut, default": {"init": "teacher"},
    "teacher's vocabulary, next": {"init": "teacher", "vocab": "teacher", "loss": NEXT},
    "teacher's vocabulary, default": {"init": "teacher", "vocab": "teacher"},
}
"""What an arm changes of the default. Its first word is its start: gains are over `next` of it.
A cut needs a student with the teacher's size of heads."""

BATCH = 2048  # teacher tokens
SCORES = "books.json"
BOOKS = {"choosing": 5_450_000, "scored": 10_900_000}
"""Their first characters in the corpus: later books, by other authors, with a paragraph a line."""
LENGTH = 100_000


def later_books(corpus: Path, work: Path) -> dict[str, Path]:
    """Write the paragraphs of books outside the store to separate files."""
    whole, paths = corpus.read_text("utf-8"), dict[str, Path]()
    for name, first in BOOKS.items():
        text = whole[first : first + LENGTH]
        paths[name] = work / f"{name}.txt"
        paths[name].write_text(text[text.index("\n") + 1 : text.rindex("\n") + 1], "utf-8")
    return paths


def bits_per_byte(model: Path, books: dict[str, Path], scores: Path) -> dict[str, float]:
    """Score a decoder's folder on files of documents, one per line, unless `scores` exists."""
    if not scores.exists():
        found = score_lm(str(model), books, LmSettings(), say=lambda line: None)["mean"]
        scores.write_text(json.dumps({name: found[name]["bits_per_byte"] for name in books}))
    known: dict[str, float] = json.loads(scores.read_text())
    return known


class Bench:
    """Trains and scores the students of one store, shape, vocabulary and number of tokens."""

    def __init__(
        self,
        work: Path,
        store: Path,
        books: dict[str, Path],
        common: dict[str, Any],
        rates: Sequence[float],
    ) -> None:
        self.work, self.store, self.books = work, store, books
        self.common, self.rates = common, rates

    def scored(self, arm: str, rate: float, seed: int) -> float:
        """Train and score a student unless it is finished; return its figure for the choice."""
        words = {**self.common, **ARMS[arm], "lr": rate, "seed": seed}
        name = [words["student"], words["vocab"], words["steps"], arm, f"{rate:g}", seed]
        out = self.work / "-".join(str(each).replace(" ", "") for each in name)
        given = {"store": (str(self.store),), "out": out, "cache": "ram", **words}
        if "loss" in words:
            given["loss"] = tuple(words["loss"].split(","))
        run(checked_from(given), resume=out.exists(), say=lambda line: None)
        found = bits_per_byte(out, self.books, out / SCORES)
        print(out.name, found, flush=True)
        return found["choosing"]

    def train(self, arms: Sequence[str], seeds: int) -> None:
        """Train and score arms at their best rates. The `next` arm of each start comes first."""
        best = 0.0
        for arm in arms:
            plain = arm.endswith(", next")
            near = [rate for rate in self.rates if best / 2 <= rate <= best * 2]
            tried = near if near and not plain else self.rates
            rate = min(tried, key=lambda each: self.scored(arm, each, 0))
            for seed in range(1, seeds):
                self.scored(arm, rate, seed)
            if plain:
                best = rate


class Cell(NamedTuple):
    """Names a row of the table."""

    student: str
    vocab: str
    tokens: int
    start: str
    losses: str


class Trained(NamedTuple):
    """Holds the result of a finished training: bits a byte of the store's held-out part and of two
    books."""

    rate: float
    seed: int
    parameters: int
    valid: float
    choosing: float
    scored: float


def finished(work: Path) -> dict[Cell, list[Trained]]:
    """Return all finished and scored trainings of a folder."""
    cells = defaultdict[Cell, list[Trained]](list)
    for scores in sorted(work.glob(f"*/{SCORES}")):
        training = json.loads((scores.parent / "training.json").read_text())
        words, result = training["settings"], training["result"]
        default = dict(NEXT_LOSS)
        if words["vocab"] == "teacher":
            default.pop("next-inside")  # as `default_losses` does
        cell = Cell(
            words["student"],
            words["vocab"],
            words["steps"] * words["batch_tokens"],
            STARTS[words["init"]],
            "default" if words["loss"] == default else loss_words(words["loss"]),
        )
        valid, size = result["valid_bits_per_byte"], result["parameters"]
        books = json.loads(scores.read_text())
        cells[cell].append(Trained(words["lr"], words["seed"], size, valid, **books))
    return cells


def at_best_rate(found: Sequence[Trained]) -> dict[int, Trained]:
    """Return the trainings of a cell at the rate that is best at the first seed, by seed."""
    first = min(each.seed for each in found)
    of_first = (each for each in found if each.seed == first)
    rate = min(of_first, key=lambda each: each.choosing).rate
    return {each.seed: each for each in found if each.rate == rate}


def gain_over(plain: dict[int, Trained], seeds: dict[int, Trained]) -> str:
    """Return the mean difference to `next` with the same seeds, and its deviation."""
    gains = [seeds[each].scored - plain[each].scored for each in seeds if each in plain]
    if not gains or seeds is plain:
        return ""
    deviation = f" ± {np.std(gains, ddof=1):.3f}" if len(gains) > 1 else ""
    return f"{np.mean(gains):+.3f}{deviation}"


def table_rows(work: Path) -> list[list[object]]:
    """Return a row for each cell: its seeds at its best rate, and their gains over `next`, after
    the same number of tokens and after the number that is best for `next`."""
    cells, rows = finished(work), list[list[object]]()
    best = {cell: at_best_rate(trainings) for cell, trainings in cells.items()}

    def figure(cell: Cell) -> float:
        return best[cell][min(best[cell])].choosing

    for cell in sorted(best, key=lambda each: (*each[:4], each.losses != NEXT, each.losses)):
        seeds = best[cell]
        one, rates = seeds[min(seeds)], {each.rate for each in cells[cell]}
        equal = cell._replace(losses=NEXT)
        lengths = [each for each in best if each._replace(tokens=cell.tokens) == equal]
        at_best = best[min(lengths, key=figure)] if equal in best else {}
        rows.append([
            cell.student, f"{one.parameters / 1e6:.1f}", cell.vocab, f"{cell.tokens / 1e6:.1f}",
            cell.start, cell.losses, f"{one.rate:g} of {len(rates)}", len(seeds),
            f"{one.valid:.3f}", f"{one.choosing:.3f}",
            mean_and_deviation([each.scored for each in seeds.values()]),
            gain_over(best.get(equal, {}), seeds), gain_over(at_best, seeds),
        ])  # fmt: skip
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
@results_option
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
        "checkpoint_every": 50,
        "precision": "fp32",  # the rows of one table can come from several machines
    }
    every = [float(rate) for rate in rates.split(",")]
    books = later_books(corpus, work)
    bench = Bench(work, path, books, common, every)
    bench.train([each.strip() for each in arms.split(";") if each.strip()], seeds)
    own = bits_per_byte(Path(model), books, work / f"teacher-{Path(model).name}.json")
    with open_store(path) as opened:
        stored_tokens = f"{opened.meta['tokens']:,}"
        states = " and mean states" if opened.features.hidden else ""
    settings = (
        f"`python -m benchmarks.quality.decoders`; teacher {Path(model).name}"
        f" ({own['scored']:.3f} bits a byte), {stored_tokens} stored tokens of English novels, top"
        f" 64{states}; steps of {BATCH:,} teacher tokens. Held out, choosing and bits a byte: of"
        f" the store's held-out part and of {LENGTH:,} characters of each of two books by other"
        " authors. A start `cut` is `--init teacher`. A row is at the rate that is best for the"
        " choosing book at the first seed, of the number of rates tried; the last book has no part"
        " in any choice. Gains are by seed, over `next=1` with the same start at its own best rate:"
        " after the same number of tokens, and after the number of tokens that is best for `next=1`"
        f" by the choosing book. The default is `{loss_words(NEXT_LOSS)}`; with the teacher's"
        " pieces it has no `next-inside`, which is 0 there."
    )
    head = (
        "student", "M", "pieces", "M tokens", "start", "losses", "lr", "seeds", "held out",
        "choosing", "bits a byte", "minus `next`", "minus best `next`",
    )  # fmt: skip
    publish("Decoder students", settings, table(head, table_rows(work)), results)


if __name__ == "__main__":
    main()
