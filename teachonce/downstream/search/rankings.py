"""Ranks all documents of a collection for its queries, or the candidates of each query."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.checkpoints.embedders import Embedder, PairScorer, reads_pairs
from teachonce.downstream.search.collections import Collection, texts_of
from teachonce.student_train.losses.registry import losses_for
from teachonce.student_train.output.report import read_report, trained_losses
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError

# With BLOCK documents, 4 MB of similarities.
QUERIES_AT_ONCE = 256


def nearest(queries: Floats, blocks: Iterable[Floats], depth: int) -> tuple[Floats, Array]:
    """Search all `blocks` of documents [N,D] for the `depth` nearest to each of `queries` [Q,D].

    Similarity is the dot product. Of documents with equal similarity, the first one wins. Returns
    the similarities and the numbers of the documents [Q, depth], the nearest first.
    """
    scores: Floats = np.zeros((len(queries), 0), np.float32)
    indices: Array = np.zeros((len(queries), 0), np.int64)
    seen = 0
    for documents in blocks:
        best = []
        for begin in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(begin, begin + QUERIES_AT_ONCE)
            similarity = np.concatenate([scores[rows], queries[rows] @ documents.T], axis=1)
            new = np.tile(seen + np.arange(len(documents)), (len(similarity), 1))
            numbers = np.concatenate([indices[rows], new], axis=1)
            # Earlier documents come first, so that a stable sort lets them win a tie.
            order = np.argsort(-similarity, axis=1, kind="stable")[:, :depth]
            best.append([np.take_along_axis(part, order, 1) for part in (similarity, numbers)])
        scores, indices = (np.concatenate(part) for part in zip(*best, strict=True))
        seen += len(documents)
    return scores, indices


BLOCK = 4096
"""Documents that are embedded and searched at once."""
# The deepest measure is recall@100.
DEPTH = 100
"""Documents in a ranking."""


def retrieved(
    collection: Collection, queries: Embedder, documents: Embedder, depth: int = DEPTH
) -> dict[str, list[str]]:
    """Rank the `depth` nearest documents of each query, best first.

    Raises UserError if the vectors of the two models differ in size.
    """
    names: list[str] = []

    def blocks() -> Iterator[Floats]:
        read = collection.documents()
        # `nearest` takes the blocks in order, so that its numbers are indices of `names`.
        while rows := list(islice(read, BLOCK)):
            names.extend(name for name, _ in rows)
            vectors = documents.vectors([text for _, text in rows], "document")
            if embedded.shape[1] != vectors.shape[1]:
                raise UserError(
                    f"--documents-by {documents.name}: its vectors have {vectors.shape[1]} numbers,"
                    f" the vectors of {queries.name} {embedded.shape[1]}; to search the teacher's"
                    " index, a student needs its projection into the teacher's space"
                )
            yield vectors

    embedded = queries.vectors(list(collection.queries.values()), "query")
    # One more, because `without_itself` removes a document that has the id of the query.
    _, indices = nearest(embedded, blocks(), depth + 1)
    ranked = zip(collection.queries, indices.tolist(), strict=True)
    return {
        query: without_itself(query, [names[index] for index in row])[:depth]
        for query, row in ranked
    }


def without_itself(query: str, ranking: Sequence[str]) -> list[str]:
    """Leave the query itself out of its ranking, as BEIR's evaluation does: queries of some
    collections, such as ArguAna, are documents."""
    return [name for name in ranking if name != query]


def check_space(model: str, documents_by: str) -> None:
    """Raise UserError for a student that was not trained to reproduce the teacher's vectors.

    Its vectors cannot be compared with the teacher's, even if they have the same size.
    """
    report = read_report(Path(os.path.expanduser(model)))
    if report is None:
        return
    names = trained_losses(report["settings"])
    learnt = [loss for loss in losses_for(None, names) if loss.of_vectors]
    if all(loss.projection == "none" for loss in learnt):
        raise UserError(
            f"--documents-by {documents_by}: {model} was trained with {', '.join(sorted(names))},"
            " none of which compares its vectors with the teacher's: it cannot search the teacher's"
            " index; train it with --loss embedding=1 as well, or leave --documents-by out"
        )


def reranked(
    collection: Collection,
    model: str,
    candidates: dict[str, list[str]],
    where: str,
    max_length: int | None,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, list[str]]:
    """Sort the candidates of each query by the scores of a cross-encoder or an embedder.

    Candidates with equal scores stay in their order. Raises UserError for a query without a
    candidate, for a candidate that is not in the corpus, and for a model that cannot be loaded.
    """
    candidates = {query: without_itself(query, row) or row for query, row in candidates.items()}
    texts = texts_of(collection, candidates, where)
    pairwise = reads_pairs(model)
    scores: Any = _by_pairs if pairwise else _by_vectors
    loaded: Any = (PairScorer if pairwise else Embedder)(model, max_length)
    rankings = {}
    for query, row in scores(loaded, collection, candidates, texts):
        names = candidates[query]
        rankings[query] = [names[index] for index in np.argsort(-row, kind="stable")]
    if note := loaded.cuts.note():
        say(f"{model}: {note}")
    return rankings


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
    index = {name: number for number, name in enumerate(texts)}
    documents = model.vectors(list(texts.values()), "document")
    vectors = model.vectors(list(collection.queries.values()), "query")
    for query, vector in zip(collection.queries, vectors, strict=True):
        yield query, documents[[index[name] for name in candidates[query]]] @ vector
