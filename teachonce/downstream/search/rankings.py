"""Ranks the documents of a collection for its queries: all of them, or the candidates of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.checkpoints.embedders import Embedder, PairScorer, reads_pairs
from teachonce.downstream.search.beir import Collection
from teachonce.downstream.search.candidates import texts_of
from teachonce.downstream.search.nearest import nearest
from teachonce.student_train.losses.registry import losses_for
from teachonce.student_train.output.report import losses_learnt, read_report
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError

BLOCK = 4096
"""Documents that are embedded and searched at once."""
DEPTH = 100
"""Documents of a ranking."""


def retrieved(
    collection: Collection, queries: Embedder, documents: Embedder, depth: int = DEPTH
) -> dict[str, list[str]]:
    """Rank the `depth` nearest documents of each query, best first.

    Raises UserError where the two models give vectors of other widths.
    """
    names: list[str] = []

    def blocks() -> Iterator[Floats]:
        read = collection.documents()
        while rows := list(islice(read, BLOCK)):
            names.extend(name for name, _ in rows)
            vectors = documents.vectors([text for _, text in rows], "document")
            _check_widths(queries, asked, documents, vectors)
            yield vectors

    asked = queries.vectors(list(collection.queries.values()), "query")
    places = nearest(asked, blocks(), depth).places
    found = zip(collection.queries, places.tolist(), strict=True)
    return {query: [names[place] for place in row] for query, row in found}


def check_space(model: str, documents_by: str) -> None:
    """Raise UserError for a student of ours that was never compared with a teacher's vectors: it
    has a space of its own, however wide."""
    report = read_report(Path(os.path.expanduser(model)))
    if report is None:
        return
    names = losses_learnt(report["settings"])
    learnt = [loss for loss in losses_for(False, names) if loss.of_text]
    if all(loss.projection == "none" for loss in learnt):
        raise UserError(
            f"--documents-by {documents_by}: {model} has learnt {', '.join(sorted(names))}, none of"
            " which compares its vectors with the teacher's: it cannot search the teacher's index;"
            " train it by --loss embedding=1 as well, or leave --documents-by out"
        )


def _check_widths(queries: Embedder, asked: Floats, documents: Embedder, found: Floats) -> None:
    if asked.shape[1] != found.shape[1]:
        raise UserError(
            f"--documents-by {documents.name}: its vectors are {found.shape[1]} wide, and those of"
            f" {queries.name} {asked.shape[1]}; a student searches the teacher's index where it"
            " keeps its projection into the teacher's space"
        )


def reranked(
    collection: Collection,
    model: str,
    candidates: dict[str, list[str]],
    where: str,
    max_length: int | None = None,
) -> dict[str, list[str]]:
    """Put the candidates of each query into the order of a model: of one that reads query and
    document at once, or of one of vectors. Of equal ones the better candidate stays ahead.

    Raises UserError as `texts_of` and the models do.
    """
    texts = texts_of(collection, candidates, where)
    pairwise = reads_pairs(model)
    scores: Any = _by_pairs if pairwise else _by_vectors
    loaded: Any = (PairScorer if pairwise else Embedder)(model, max_length)
    found = {}
    for query, row in scores(loaded, collection, candidates, texts):
        names = candidates[query]
        found[query] = [names[place] for place in np.argsort(-row, kind="stable")]
    return found


def _by_pairs(
    model: PairScorer,
    collection: Collection,
    candidates: dict[str, list[str]],
    texts: dict[str, str],
) -> Iterator[tuple[str, Floats]]:
    for query, text in collection.queries.items():
        yield query, model.scores([(text, texts[name]) for name in candidates[query]])


def _by_vectors(
    model: Embedder,
    collection: Collection,
    candidates: dict[str, list[str]],
    texts: dict[str, str],
) -> Iterator[tuple[str, Floats]]:
    place = {name: number for number, name in enumerate(texts)}
    documents = model.vectors(list(texts.values()), "document")
    asked = model.vectors(list(collection.queries.values()), "query")
    for query, vector in zip(collection.queries, asked, strict=True):
        yield query, documents[[place[name] for name in candidates[query]]] @ vector
