"""Students of sentence embeddings: their scores, bytes and minutes, beside the teacher's scores.

    python -m benchmarks.quality.embedding_students --work DIR [--store STORE] [--seeds N]

Trains from vectors of sentences of novels, WikiText, SST-2 and SNIPS, and scores tables of
similarity, of which no pair was trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.common.results import RESULTS, SHARED, mean_and_deviation, publish, table
from downstream.embedders import Embedder
from store import open_store
from student_train.arguments import options_from
from student_train.output.run import run
from support.console import command_errors

STUDENTS = ("static:64", "static:256", "128x2x2", "tiny")
TABLES = ("stsb_en.dev", "sts2012_en", "sts2013_en", "sts2014_en")
TEXTS = {
    "text/en_novels.txt": 26_000,
    "text/en_wikitext2.txt": 14_000,
    "classify/en_sst2.train.tsv": 8_000,
    "intent/en_snips.train.tsv": 8_000,
}
"""Files of the shared data, and how many of their sentences are taken."""

SHORTEST, LONGEST = 4, 50  # words of a sentence


def sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a file; of a table those of its first column."""
    for line in file.read_text("utf-8").splitlines():
        for text in re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“'A-Z])", line.split("\t")[0].strip()):
            if SHORTEST <= len(text.split()) <= LONGEST and "<unk>" not in text:
                yield text


def write_corpus(path: Path, data: Path, seed: int = 0) -> None:
    """Write the sentences of TEXTS, each once, in a random order, one a line."""
    chance, found = random.Random(seed), list[str]()
    for name, count in TEXTS.items():
        some = list(dict.fromkeys(sentences(data / name)))
        found += chance.sample(some, min(count, len(some)))
    found = list(dict.fromkeys(found))
    chance.shuffle(found)
    path.write_text("\n".join(found) + "\n", "utf-8")


def dumped(work: Path, model: str, data: Path) -> Path:
    """Dump the teacher's vectors of the corpus; returns the store."""
    from teacher_dump.job.dump import dump
    from teacher_dump.job.options import DumpOptions

    corpus, store = work / "corpus.txt", work / "vectors.zarr"
    if not corpus.exists():
        write_corpus(corpus, data)
    dump(DumpOptions(model, store, (str(corpus),), head="embedding", max_length=128), click.echo)
    return store


def correlations(model: str, tables: Sequence[Path]) -> list[float]:
    """Spearman's rank correlation of cosines and scores, of each table."""
    from scipy.stats import spearmanr

    embedder, found = Embedder(model), []
    for path in tables:
        rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()[1:]]
        one, other = (embedder.vectors([row[side] for row in rows]) for side in (0, 1))
        score = [float(row[2]) for row in rows]
        found.append(float(spearmanr((one * other).sum(axis=1), score).statistic))
    return found


def trained(store: Path, student: str, epochs: float, seed: int, out: Path) -> tuple[float, float]:
    """Train a student by the default recipe, unless it is there; returns its MB and minutes."""
    import json

    settings = {"vocab": "5k", "student": student, "epochs": epochs, "seed": seed, "out": out}
    if not (out / "model.safetensors").exists():
        run(options_from({"store": (str(store),), **settings}), say=click.echo)
    report = json.loads((out / "training.json").read_text())
    weights = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    return weights / 1e6, report["result"]["seconds"] / 60


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--store", type=click.Path(path_type=Path), help="Of vectors, made before.")
@click.option("--model", default="minilm")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data")
@click.option("--students", default=",".join(STUDENTS))
@click.option("--epochs", type=float, default=8.0)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path,
    store: Path | None,
    model: str,
    data: Path,
    students: str,
    epochs: float,
    seeds: int,
    results: Path,
) -> None:
    """Train students of vectors by the default recipe, and score them as search would use them."""
    work.mkdir(parents=True, exist_ok=True)
    store = store or dumped(work, model, data)
    tables = [data / "sts" / f"{name}.tsv" for name in TABLES]
    texts, teacher = len(open_store(store)), correlations(model, tables)
    rows: list[list[object]] = [["teacher", "", "", *teacher, float(np.mean(teacher)), "100 %"]]
    for student in students.split(","):
        folders = [work / f"{student.replace(':', '-')}-{seed}" for seed in range(seeds)]
        costs = [trained(store, student, epochs, n, out) for n, out in enumerate(folders)]
        scores = np.array([correlations(str(out), tables) for out in folders])
        means = scores.mean(axis=1)
        each = [mean_and_deviation(list(column)) for column in scores.T]
        share = f"{means.mean() / np.mean(teacher):.1%}"
        size, minutes = np.mean(costs, axis=0)
        rows.append([student, f"{size:.1f}", f"{minutes:.1f}", *each,
                     mean_and_deviation(list(means)), share])  # fmt: skip
    settings = (
        f"`python -m benchmarks.quality.embedding_students --epochs {epochs:g} --seeds {seeds}`;"
        f" teacher {model}, {texts:,} sentences, none of them of these tables; 5k WordPiece,"
        f" default recipe, {epochs:g} epochs of batches of 128 texts; float32 weights. Spearman's"
        " rank correlation of cosines and people's scores."
    )
    head = ("student", "MB", "minutes", *TABLES, "mean", "of the teacher's")
    publish("Students of sentence embeddings", settings, table(head, rows), results)


if __name__ == "__main__":
    main()
