"""Scores rankings against judgements, or against the ranking of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teachonce.downstream.search.collections import Judgements
from teachonce.support.packages import library

Ranking = Mapping[str, Sequence[str]]
"""Ids of documents by query, the best first."""
TOP = 10
"""The number of documents per query that agreement with the teacher is measured on."""
JUDGED = {"nDCG@10": "ndcg_10", "MRR@10": "mrr_10", "recall@100": "recall_100"}
AGREEMENT = {"nDCG@10 by teacher": "teacher_ndcg_10", "overlap@10 with teacher": "overlap_10"}


def judged(judgements: Judgements, ranking: Ranking) -> dict[str, float]:
    """Compute the measures of JUDGED as trec_eval does: the mean over all judged queries.

    nDCG takes the grades as gains (Järvelin & Kekäläinen 2002, with a logarithmic discount). For
    MRR and recall, a document with a grade above 0 is relevant.

    Raises UserError if ir-measures is missing.
    """
    return _computed(
        {"nDCG@10": "ndcg_10", "RR@10": "mrr_10", "R@100": "recall_100"}, judgements, ranking
    )


def agreement(teacher: Ranking, ranking: Ranking) -> dict[str, float]:
    """Compute the measures of AGREEMENT with the teacher's ten best documents of each query.

    For nDCG the teacher's first document has the grade 10, its tenth 1, all others 0. Overlap is
    the share of the ten that are also in the ranking's first ten.

    Raises UserError if ir-measures is missing.
    """
    grades = {
        query: {name: TOP - rank for rank, name in enumerate(names[:TOP])}
        for query, names in teacher.items()
    }
    return _computed({"nDCG@10": "teacher_ndcg_10", "R@10": "overlap_10"}, grades, ranking)


def _computed(
    names: Mapping[str, str], judgements: Judgements, ranking: Ranking
) -> dict[str, float]:
    measures = library("ir_measures", "embedding", "scores of rankings")
    # Ranks as scores, not similarities: trec_eval would reorder documents of equal similarity.
    run = {
        query: {name: float(-rank) for rank, name in enumerate(names)}
        for query, names in ranking.items()
    }
    keys = {measures.parse_measure(name): key for name, key in names.items()}
    values = measures.calc_aggregate(list(keys), judgements, run)
    return {key: float(values[measure]) for measure, key in keys.items()}
