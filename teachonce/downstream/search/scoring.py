"""The tasks retrieval and rerank: score the rankings of any model, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from teachonce.checkpoints.embedders import Embedder
from teachonce.downstream.score_tables import SHARES, result_of
from teachonce.downstream.search import measures
from teachonce.downstream.search.collections import Collection, read_collection, read_run
from teachonce.downstream.search.rankings import DEPTH, check_space, reranked, retrieved
from teachonce.downstream.settings import SearchSettings
from teachonce.support.errors import UserError

Say = Callable[[str], object]
Rank = Callable[[str], dict[str, list[str]]]
"""Takes the name of a model, returns its ranking of a collection."""


def score_search(
    task: str,
    models: Sequence[str],
    files: Mapping[str, Path],
    settings: SearchSettings,
    say: Say = print,
) -> list[dict[str, Any]]:
    """Score the rankings of `models` on collections in BEIR's layout.

    task: "retrieval" ranks all documents by vectors; "rerank" ranks the candidates of each query,
        by vectors or with a cross-encoder.
    files: the folders, from `splits_to_test`.

    With judgements the measures are `measures.JUDGED` (for rerank without recall, which depends
    only on the candidates), with a teacher also `measures.AGREEMENT`. Returns for each model the
    same dictionary as `fine_tune`, for one run without a seed.

    Raises UserError for wrong models and files, and if there are neither judgements nor a teacher.
    """
    about = {"task": task, "scale": SHARES, "setup": settings.setup()}
    runs: dict[str, dict[str, Any]] = {model: {} for model in models}
    examples, named = {}, None
    for split, folder in files.items():
        collection = read_collection(folder)
        if missing := collection.missing():
            say(
                f"{folder.name}: {len(missing):,} relevant documents are not in the corpus,"
                f" such as {missing[0]!r}; they count as not found"
            )
        rank = (
            _retrieval(collection, settings, say)
            if task == "retrieval"
            else _rerank(collection, settings, say)
        )
        keys = _measures(task, collection, settings)
        if named is not None and keys != named:
            raise UserError(
                f"--test {folder}: has {('' if collection.judgements else 'no ')}relevance"
                " judgements (qrels), unlike the folders before it; score folders with judgements"
                " and folders without them separately"
            )
        named, examples[split] = keys, len(collection.queries)
        teacher = rank(settings.teacher) if settings.teacher else None
        for model in models:
            figures = _figures(collection, rank(model), teacher)
            runs[model][split] = {key: figures[key] for key in keys.values()}
            runs[model][split]["primary"] = figures[next(iter(keys.values()))]
            scores = ", ".join(f"{name} {SHARES * figures[key]:.2f}" for name, key in keys.items())
            say(f"{model}, {folder.name}, queries: {len(collection.queries):,}: {scores}")
    assert named is not None
    about |= {"measures": named, "primary": next(iter(named.values()))}
    shown = {"as_is": True, **asdict(settings)}
    return [result_of(about, model, files, shown, examples, [runs[model]]) for model in models]


def _measures(task: str, collection: Collection, settings: SearchSettings) -> dict[str, str]:
    """Return the measures that can be computed from the judgements and the teacher's ranking: the
    keys of the scores, by heading.

    Raises UserError if there is neither a judgement nor a teacher.
    """
    keys = dict(measures.JUDGED) if collection.judgements else {}
    if task == "rerank":
        keys.pop("recall@100", None)
    if settings.teacher:
        keys |= measures.AGREEMENT
    if not keys:
        raise UserError(
            f"--test {collection.folder}: has no judgements (qrels.tsv); add them, or compare with"
            " the ranking of a teacher: --teacher MODEL"
        )
    return keys


def _figures(
    collection: Collection, ranking: measures.Ranking, teacher: measures.Ranking | None
) -> dict[str, float]:
    figures = measures.judged(collection.judgements, ranking) if collection.judgements else {}
    return figures | (measures.agreement(teacher, ranking) if teacher else {})


def _retrieval(collection: Collection, settings: SearchSettings, say: Say) -> Rank:
    """Make the function that ranks all documents by vectors. `settings.documents_by` embeds the
    documents for all models except the teacher, which embeds them itself."""

    def rank(model: str) -> dict[str, list[str]]:
        queries = documents = Embedder(model, settings.max_length)
        other = settings.documents_by
        if other not in (None, model) and model != settings.teacher:
            check_space(model, str(other))
            documents = Embedder(str(other), settings.max_length)
        ranking = retrieved(collection, queries, documents)
        # `queries` and `documents` may be one object, whose note is printed once.
        for embedder in {id(embedder): embedder for embedder in (queries, documents)}.values():
            if note := embedder.cuts.note():
                say(f"{embedder.name}: {note}")
        return ranking

    return rank


def _rerank(collection: Collection, settings: SearchSettings, say: Say) -> Rank:
    """Make the function that ranks candidates. The candidates are found once for all models."""
    if settings.candidates:
        candidates = read_run(settings.candidates, settings.depth)
        where = f"--candidates {settings.candidates}"
    else:
        first = Embedder(str(settings.candidates_by), settings.max_length)
        candidates = retrieved(collection, first, first, settings.depth)
        where = f"--candidates-by {settings.candidates_by}"
    if collection.judgements:
        figures = measures.judged(collection.judgements, candidates)
        cut = f"recall@{min(settings.depth, DEPTH)}"  # candidates end at this rank
        names = {n.replace(f"recall@{DEPTH}", cut): key for n, key in measures.JUDGED.items()}
        scores = ", ".join(f"{n} {SHARES * figures[key]:.2f}" for n, key in names.items())
        say(f"candidates of {collection.folder.name}, in their own order: {scores}")

    def rank(model: str) -> dict[str, list[str]]:
        return reranked(collection, model, candidates, where, settings.max_length, say)

    return rank
