"""Students of sentence embeddings: their scores, bytes and minutes, next to the teacher's.

    python -m benchmarks.quality.embedding_students --work DIR [--store STORE] [--seeds N]

Trains from vectors and states of sentences of novels, of an encyclopedia, reviews, requests, the
web and questions, of random words of the teacher's vocabulary, and of the documents that are
searched, and scores tables of similarity and search, of which no pair and no query was trained on.
Students that others make of the same teacher are compared; Model2Vec's where it is installed
(`pip install 'model2vec[distill]'`). What is finished in --work is not made again.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.common.results import SHARED, mean_and_deviation, publish, results_option, table
from benchmarks.quality.embedding_peers import folder_of, made, peers
from teachonce.checkpoints.embedders import Embedder
from teachonce.downstream.search import measures
from teachonce.downstream.search.collections import read_collection
from teachonce.downstream.search.rankings import retrieved
from teachonce.downstream.tasks.tagging import read_tagged
from teachonce.store import open_store
from teachonce.student_export.costs import export_size
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.output.run import run
from teachonce.support.arrays import Floats
from teachonce.support.console import command_errors

STUDENTS = (
    "static:64@9k",
    "static:96@9k",
    "static:128@20k",
    "static:192@20k",
    "modernbert:128x2x2@20k",
    "modernbert:tiny@7k",
)
"""SHAPE@VOCAB: the values of --student and --vocab."""

TABLES = ("stsb_en.dev", "sts2012_en", "sts2013_en", "sts2014_en")
SEARCHED = "cranfield"
MEAN, SEARCH = len(TABLES), len(TABLES) + 1  # indices into the result of `figures`
TEXTS = {
    "text/en_novels.txt": 50_000,
    "text/en_wikitext2.txt": 16_000,
    "classify/en_sst2.train.tsv": 8_000,
    "intent/en_snips.train.tsv": 14_000,
    "pos/en_ewt.train.tsv": 12_000,
    "ner/en_wikiann.train.tsv": 8_000,
    "qa/en_xquad.json": 3_000,
}
"""Files of the shared data, and how many of their sentences are taken at most."""

OF_WORDS = 80_000
"""Texts of 2 to 8 random words, for words that the sentences lack."""

SHORTEST, LONGEST = 4, 50  # words of a sentence
PASSAGE = 70  # words of a document that make a text
MEASURED = 1_000  # texts for measurements of speed


def sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a file: of text, of a table's first column, of tags, or of
    questions."""
    text = file.read_text("utf-8")
    if file.parent.name in ("pos", "ner"):
        lines = [" ".join(sentence.words) for sentence in read_tagged(file)]
    elif file.suffix == ".json":
        paragraphs = [p for title in json.loads(text)["data"] for p in title["paragraphs"]]
        lines = [p["context"] for p in paragraphs]
        lines += [question["question"] for p in paragraphs for question in p["qas"]]
    else:
        lines = [line.split("\t")[0] for line in text.splitlines()]
    for line in lines:
        line = re.sub(r" @([-,.])@ ", r"\1", line.replace("<unk>", ""))  # of WikiText
        for sentence in re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“'A-Z])", line):
            if SHORTEST <= len(words := sentence.split()) <= LONGEST:
                yield " ".join(words)


def of_words(model: str, count: int, chance: random.Random) -> Iterator[str]:
    """Yield texts of random words of a teacher's vocabulary. Words with low ids, which are the
    frequent ones, are more likely."""
    pieces = Embedder(model).model.tokenizer.get_vocab()
    words = [word for word in sorted(pieces, key=pieces.get) if re.fullmatch("[a-z]{3,}", word)]
    weights = list(itertools.accumulate((100 + rank) ** -0.4 for rank in range(len(words))))
    for _ in range(count):
        yield " ".join(chance.choices(words, cum_weights=weights, k=chance.randint(2, 8)))


def of_documents(folder: Path) -> Iterator[str]:
    """Yield the documents of a collection, their passages and their sentences."""
    for _, text in read_collection(folder).documents():
        words = text.split()
        if words:
            yield " ".join(words)
        for begin in range(0, len(words), PASSAGE):
            yield " ".join(words[begin : begin + PASSAGE])
        for sentence in re.split(r"\s*\.\s+", " ".join(words)):
            if SHORTEST <= len(sentence.split()) <= PASSAGE:
                yield sentence


def write_corpus(path: Path, data: Path, model: str) -> None:
    """Write the sentences of TEXTS, each once, in a random order, one per line; then the texts of
    words, and the searched documents."""
    chance, lines = random.Random(0), list[str]()
    for name, count in TEXTS.items():
        unique = list(dict.fromkeys(sentences(data / name)))
        lines += chance.sample(unique, min(count, len(unique)))
    lines = list(dict.fromkeys(lines))
    chance.shuffle(lines)
    lines += of_words(model, OF_WORDS, chance)
    lines += dict.fromkeys(of_documents(data / "retrieval" / SEARCHED))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def dumped(work: Path, model: str, data: Path) -> Path:
    """Dump the teacher's vectors of the whole corpus, and its last states; return the store."""
    from transformers import AutoConfig

    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions

    corpus, store = work / "corpus.txt", work / "vectors.zarr"
    if not corpus.exists():
        write_corpus(corpus, data, model)
    last = AutoConfig.from_pretrained(folder_of(model)).num_hidden_layers
    options = DumpOptions(model, store, (str(corpus),), head="embedding", hidden=f"layer:{last}")
    dump(options, click.echo)
    return store


def correlations(embedder: Embedder, tables: Sequence[Path]) -> list[float]:
    """Return Spearman's rank correlation of cosines and scores, for each table."""
    from scipy.stats import spearmanr

    coefficients = []
    for path in tables:
        rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()[1:]]
        first, second = (embedder.vectors([row[side] for row in rows]) for side in (0, 1))
        score = [float(row[2]) for row in rows]
        coefficients.append(float(spearmanr((first * second).sum(axis=1), score).statistic))
    return coefficients


class Teacher(Embedder):
    """Embeds documents once for the searches of all students."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cached = dict[tuple[str, ...], Floats]()

    def vectors(self, texts: Sequence[str], role: str | None = None) -> Floats:
        if role != "document":
            return super().vectors(texts, role)
        key = tuple(texts)
        if key not in self.cached:
            self.cached[key] = super().vectors(texts, role)
        return self.cached[key]


def searches(embedder: Embedder, documents: Embedder, folder: Path) -> float:
    """Return nDCG@10 on a collection, with the first model for queries and the second for
    documents."""
    collection = read_collection(folder)
    assert collection.judgements is not None
    ranking = retrieved(collection, embedder, documents)
    return measures.judged(collection.judgements, ranking)["ndcg_10"]


def speed(embedder: Embedder, texts: Sequence[str], threads: int) -> float:
    """Measure texts a second on the given number of threads: the median of three times."""
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    for _ in range(3):
        started = time.perf_counter()
        embedder.vectors(texts)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return len(texts) / sorted(seconds)[1]


def figures(embedder: Embedder, teacher: Teacher, data: Path) -> list[float]:
    """Measure a model: the tables, their mean, search alone and with the teacher's documents, and
    texts per second on one and two threads."""
    tables = [data / "sts" / f"{name}.tsv" for name in TABLES]
    scores = correlations(embedder, tables)
    texts = [line.split("\t")[0] for line in tables[0].read_text("utf-8").splitlines()[1:]]
    folder = data / "retrieval" / SEARCHED
    widths = {model.vectors(texts[:1]).shape[1] for model in (embedder, teacher)}
    return [
        *scores,
        float(np.mean(scores)),
        searches(embedder, embedder, folder),
        searches(embedder, teacher, folder) if len(widths) == 1 else np.nan,
        *(speed(embedder, texts[:MEASURED], threads) for threads in (1, 2)),
    ]


def trained(store: Path, student: str, epochs: float, seed: int, out: Path) -> tuple[float, float]:
    """Train a student of STUDENTS by the default recipe unless it is finished; return its MB and
    minutes.

    Raises UserError if it was started with other settings.
    """
    shape, _, vocab = student.partition("@")
    settings = {"student": shape, "vocab": vocab or "5k", "epochs": epochs, "seed": seed}
    arguments = {"store": (str(store),), "out": out, "cache": "ram", **settings}
    report = run(checked_from(arguments), resume=out.exists(), say=click.echo)
    return export_size(out) / 1e6, report["result"]["seconds"] / 60


def row(
    name: str, costs: list[tuple[float, float]], scores: list[list[float]], teacher: list[float]
) -> list[object]:
    """Return the row of one kind of student: the means of its seeds' costs and `figures`, also as
    shares of the teacher's."""
    columns = [list(column) for column in zip(*scores, strict=True)]
    cells = ["" if np.isnan(column[0]) else mean_and_deviation(column) for column in columns[:-2]]
    shares = [f"{np.mean(columns[index]) / teacher[index]:.1%}" for index in (MEAN, SEARCH)]
    rates = [f"{np.median(column):,.0f}" for column in columns[-2:]]
    size, minutes = np.mean(costs, axis=0)
    return [name, f"{size:.1f}", f"{minutes:.1f}", *cells, *shares, *rates]


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--store", type=click.Path(path_type=Path), help="Of vectors, made before.")
@click.option("--model", default="minilm")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data")
@click.option("--students", default=",".join(STUDENTS), help="SHAPE@VOCAB, a comma-separated list.")
@click.option("--epochs", type=float, default=4.0)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@results_option
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
    path = store or dumped(work, model, data)
    drawn = "" if store else f" ({OF_WORDS:,} of random words)"
    texts, teacher = len(open_store(path)), Teacher(model)
    base = figures(teacher, teacher, data)
    rows = [
        ["teacher", "", "", *base[:-2], "100 %", "100 %", *(f"{rate:,.0f}" for rate in base[-2:])]
    ]
    for name, make in peers(model, path).items():
        folder = work / re.sub(r"\W+", "-", name.lower())
        minutes = made(make, folder)
        cost = export_size(folder) / 1e6, minutes
        rows.append(row(name, [cost], [figures(Embedder(str(folder)), teacher, data)], base))
    for student in students.split(","):
        folders = [work / f"{student.replace(':', '-')}-{seed}" for seed in range(seeds)]
        costs = [trained(path, student, epochs, n, out) for n, out in enumerate(folders)]
        scores = [figures(Embedder(str(out)), teacher, data) for out in folders]
        rows.append(row(student, costs, scores, base))
    settings = (
        f"`python -m benchmarks.quality.embedding_students --epochs {epochs:g} --seeds {seeds}`."
        f" Teacher: {model}. Texts: {texts:,}{drawn}, without any pair of these tables and any"
        " query, but with the searched documents, their passages and sentences. Students:"
        f" WordPiece, default recipe, {epochs:g} epochs of batches of 128 texts. Sizes are those of"
        " float32 weights; Model2Vec's are as it saves them. STS scores are Spearman's rank"
        f" correlations of cosines and human scores. nDCG@10 is measured on {SEARCHED}, with"
        " documents embedded by the model itself and by the teacher. Texts per second are medians"
        " over STS-B on one thread and on two."
    )
    head = (
        "student", "MB", "minutes", *TABLES, "mean", "nDCG@10",
        "nDCG@10, documents by the teacher", "mean, share of the teacher's",
        "nDCG@10, share of the teacher's", "texts/s", "texts/s on two threads",
    )  # fmt: skip
    publish("Students of sentence embeddings", settings, table(head, rows), results)


if __name__ == "__main__":
    main()
