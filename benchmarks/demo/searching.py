"""Dump the teacher's vectors of the passages, train a student on them, and search by both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import whole_size
from benchmarks.demo.folder import Demo, say
from benchmarks.demo.passages import QUESTIONS, write_passages
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError

TOP = 10  # passages that a ranking is compared by
TIMED = 400  # passages that a model embeds for its speed
PASSES = 2  # the faster run counts, as the first one also warms up


@dataclass(frozen=True)
class Settings(Demo):
    """Sets the sizes of the demo, which determine its whole computation."""

    out: Path = Path("demo-output")
    model: str = "minilm"
    max_length: int = 96
    vocab: str = "4k"
    student: str = "static:256"
    epochs: float = 20.0
    every: int = 1
    seed: int = 0

    @property
    def corpus(self) -> Path:
        return self.out / "passages.txt"


@dataclass(frozen=True)
class Searcher:
    """Holds a model and its vectors [N,W] of all passages."""

    name: str
    embedder: Any
    index: Floats

    def best(self, questions: Sequence[str], index: Floats | None = None) -> list[list[int]]:
        """Rank the TOP passages for each question, with `index` if it is given."""
        from teachonce.downstream.search.rankings import nearest

        queries = self.embedder.vectors(questions, "query")
        _, indices = nearest(queries, [self.index if index is None else index], TOP)
        ranking: list[list[int]] = indices.tolist()
        return ranking


@dataclass(frozen=True)
class Model:
    """Holds one row of the comparison. `agreement` is nDCG@10 against the teacher's ranking."""

    name: str
    parameters: int
    passages_per_second: float
    agreement: float

    @property
    def megabytes(self) -> float:
        """Return the size of the weights in float32."""
        return self.parameters * 4 / 1e6


@dataclass(frozen=True)
class Search:
    """Holds the passages and the models that search them, in the teacher's space."""

    passages: list[str]
    teacher: Searcher
    student: Searcher

    def compared(self) -> list[Model]:
        """Score the teacher, the student, and the student's questions in the teacher's index."""
        of_teacher = self.teacher.best(QUESTIONS)
        rankings = {
            "teacher": (self.teacher, of_teacher),
            "student": (self.student, self.student.best(QUESTIONS)),
            "student in the teacher's index": (
                self.student,
                self.student.best(QUESTIONS, self.teacher.index),
            ),
        }
        speeds = {searcher.name: self._speed(searcher) for searcher in (self.teacher, self.student)}
        return [
            Model(
                name,
                parameters=searcher.embedder.parameters(),
                passages_per_second=speeds[searcher.name],
                agreement=agreement(of_teacher, ranking),
            )
            for name, (searcher, ranking) in rankings.items()
        ]

    def _speed(self, searcher: Searcher) -> float:
        sample = np.linspace(0, len(self.passages) - 1, min(TIMED, len(self.passages)))
        texts, seconds = [self.passages[int(index)] for index in sample], []
        for _ in range(PASSES):
            started = time.perf_counter()
            searcher.embedder.vectors(texts, "document")
            seconds.append(time.perf_counter() - started)
        return len(texts) / min(seconds)


def agreement(teacher: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the mean nDCG@10 of rankings, with grades 10 to 1 for the teacher's first ten."""
    from teachonce.downstream.search import measures

    by_teacher, by_other = (
        {str(query): [str(passage) for passage in row] for query, row in enumerate(rows)}
        for rows in (teacher, other)
    )
    return measures.agreement(by_teacher, by_other)["teacher_ndcg_10"]


def demo(settings: Settings) -> Search:
    """Dump and train, after removing an earlier demo from the folder."""
    settings.clear()
    _dump(settings)
    say(f"2. a student {settings.student} ({settings.vocab} pieces) is trained on these vectors")
    settings.train(seed=settings.seed)
    return load(settings)


def load(settings: Settings) -> Search:
    """Load a finished demo. The teacher's vectors of the passages come from the store.

    Raises UserError if there is no finished demo.
    """
    from teachonce.checkpoints.embedders import Embedder
    from teachonce.store import open_store

    if not (settings.folder / "modules.json").is_file():
        raise UserError(f"{settings.out}: has no finished demo to ask; run `make demo` first")
    store = open_store(settings.store)
    texts, vectors = list(store.texts()), store.embeddings()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    student = Embedder(str(settings.folder))
    return Search(
        texts,
        Searcher("teacher", Embedder(settings.model), vectors),
        Searcher("student", student, student.vectors(texts, "document")),
    )


def _dump(settings: Settings) -> None:
    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions

    count = write_passages(settings.corpus, settings.every)
    say(f"1. the teacher {settings.model} reads {count:,} passages of Python's documentation")
    result = dump(
        DumpOptions(
            settings.model,
            settings.store,
            (str(settings.corpus),),
            head="embedding",
            max_length=settings.max_length,
            seed=settings.seed,
            device="cpu",
        )
    )
    size = whole_size(settings.store)
    say(
        f"   {settings.store}: {result.tokens:,} tokens, a vector a passage,"
        f" {size / 1e6:.0f} MB with the teacher's weights"
    )
