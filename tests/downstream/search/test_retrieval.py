"""Rankings and their measures equal hand computation and sentence-transformers.

- Measures of rankings equal numbers computed by hand; search equals a plain sort.
- retrieval and rerank have the scores of sentence-transformers for the same models and files.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachonce.checkpoints.embedders import Embedder, PairScorer
from teachonce.downstream.search.collections import read_collection
from teachonce.downstream.search.measures import agreement, judged
from teachonce.downstream.search.rankings import nearest, without_itself
from tests.downstream.search.collections import collection, judge, write
from tests.downstream.support import done, refused, scores_of
from tests.end_to_end.support import Word
from tests.making.models import Teachers
from tests.making.sentence_folders import dense, modules, normalize, pooling


def test_grades_count_as_gains() -> None:
    """Grades 1, 0, 2 give DCG 1 + 2/2 with the ideal 2 + 1/log2(3). A query without results counts,
    and so does a judged document that no model can find."""
    judgements = {"1": {"a": 2, "b": 1, "c": 0}, "2": {"x": 1, "gone": 1}}
    found = judged(judgements, {"1": ["b", "c", "a"], "2": ["y"]})
    assert found["ndcg_10"] == pytest.approx((2 / (2 + 1 / math.log2(3)) + 0) / 2)
    assert found["mrr_10"] == pytest.approx(0.5)
    assert found["recall_100"] == pytest.approx(0.5)


def test_the_cuts_are_where_their_names_say() -> None:
    """A result at rank 11 counts for recall only, and a result at rank 101 does not count."""
    others = [f"d{number}" for number in range(100)]
    for place, expected in ((9, 1 / 10), (10, 0.0)):
        ranking = [*others[:place], "x", *others[place:]]
        found = judged({"q": {"x": 1}}, {"q": ranking})
        assert found["mrr_10"] == pytest.approx(expected)
        assert found["ndcg_10"] == pytest.approx(expected and 1 / math.log2(11))
        assert found["recall_100"] == 1
    assert judged({"q": {"x": 1}}, {"q": [*others, "x"]})["recall_100"] == 0


def test_a_query_without_a_ranking_counts_as_nothing_found() -> None:
    assert judged({"1": {"a": 1}, "2": {"a": 1}}, {"1": ["a"]})["ndcg_10"] == 0.5


def test_agreement_sees_members_and_order() -> None:
    names = [f"d{number}" for number in range(14)]
    teacher = {"q": names}
    assert agreement(teacher, {"q": names}) == pytest.approx(
        {"teacher_ndcg_10": 1, "overlap_10": 1}
    )
    swapped = [names[1], names[0], *names[2:]]
    ideal = sum((10 - place) / math.log2(place + 2) for place in range(10))
    lost = 1 - 1 / math.log2(3)  # of grade 10 against 9, in the first place against the second
    found = agreement(teacher, {"q": swapped})
    assert found["teacher_ndcg_10"] == pytest.approx(1 - lost / ideal)
    assert found["overlap_10"] == 1
    assert agreement(teacher, {"q": names[9:]})["overlap_10"] == pytest.approx(0.1)
    few = {"q": names[:4]}
    assert agreement(few, few) == pytest.approx({"teacher_ndcg_10": 1, "overlap_10": 1})


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(1, 9),
)
def test_blocks_change_nothing(seed: int, queries: int, sizes: list[int], depth: int) -> None:
    """Small whole numbers, so that many documents are equally near."""
    draws = np.random.default_rng(seed)
    asked = draws.integers(-2, 3, (queries, 3)).astype(np.float32)
    blocks = [draws.integers(-2, 3, (size, 3)).astype(np.float32) for size in sizes]
    found, places = nearest(asked, blocks, depth)
    whole = np.concatenate([np.zeros((0, 3), np.float32), *blocks])
    scores = asked @ whole.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
    assert np.array_equal(places, order)
    assert np.array_equal(found, np.take_along_axis(scores, order, 1))


PROMPTS = {"query": "the lamp: ", "document": "old "}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collection(tmp_path_factory.mktemp("beir") / "small")


@pytest.fixture(scope="module")
def folder(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with prompts, cls pooling and a dense layer to 16."""
    made = tmp_path_factory.mktemp("sentence") / "model"
    parts = (pooling("cls"), dense(32, 16), normalize())
    return modules(*parts, base=tiny_teacher("bert"), folder=made, prompts=PROMPTS)


def scored(out: Path, *words: Word) -> Any:
    done(*words, "--out", out)
    return scores_of(out)


def evaluated(folder: Path, small: Path) -> dict[str, float]:
    """Return the scores of the library's evaluator, whose gains are 1 for every grade above 0."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    read = read_collection(small)
    assert read.judgements
    queries: Any = read.queries
    texts: Any = dict(read.documents())
    relevant = {query: set(grades) for query, grades in read.judgements.items()}
    evaluator = InformationRetrievalEvaluator(
        *(queries, texts, relevant), query_prompt_name="query", corpus_prompt_name="document",
        precision_recall_at_k=[10, 100], write_csv=False,
    )  # fmt: skip
    found: dict[str, float] = evaluator(SentenceTransformer(str(folder), device="cpu"))
    return found


def test_retrieval_is_what_the_library_finds(folder: Path, small: Path, tmp_path: Path) -> None:
    words = ("--task", "retrieval", "--model", folder, "--test", small)
    result = scored(tmp_path / "out", *words)
    found, expected = result["mean"]["test"], evaluated(folder, small)
    assert found["mrr_10"] == pytest.approx(expected["cosine_mrr@10"])
    assert found["recall_100"] == pytest.approx(expected["cosine_recall@100"])
    assert result["primary"] == "ndcg_10" and found["primary"] == found["ndcg_10"]
    assert result["examples"] == {"test": len(read_collection(small).queries)}
    equal = tmp_path / "equal"
    collection(equal)
    grades = read_collection(small).judgements or {}
    judge(equal / "qrels.tsv", {q: dict.fromkeys(found, 1) for q, found in grades.items()})
    binary = scored(tmp_path / "b", *words[:-1], equal)["mean"]["test"]
    assert binary["ndcg_10"] == pytest.approx(expected["cosine_ndcg@10"])
    assert binary["ndcg_10"] != pytest.approx(found["ndcg_10"])
    table = done("--task", "table", tmp_path / "out")
    assert "nDCG@10" in table and f"{100 * found['mrr_10']:.2f}" in table


def test_two_models_and_a_teacher(
    folder: Path, small: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """A teacher agrees with itself completely; without judgements this is the only score."""
    bare = collection(tmp_path / "bare", judged=False)
    other = tiny_teacher("distilbert")  # no folder of sentence-transformers
    words = ("--task", "retrieval", "--teacher", folder, "--model", folder, "--model", other)
    result = scored(tmp_path / "out", *words, "--test", bare)
    assert list(result["measures"]) == ["nDCG@10 by teacher", "overlap@10 with teacher"]
    mine, its = (each["test"] for each in result["seeds"])
    assert mine["teacher_ndcg_10"] == mine["overlap_10"] == pytest.approx(1)
    assert 0 < its["overlap_10"] < 1
    judged = scored(tmp_path / "both", *words, "--test", small)
    assert len(judged["measures"]) == 5
    assert [each["test"]["overlap_10"] for each in judged["seeds"]] == pytest.approx(
        [mine["overlap_10"], its["overlap_10"]]
    )


def test_documents_by_another_model(
    folder: Path, small: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    parts = (pooling("cls"), dense(32, 16), normalize())
    modules(*parts, base=tiny_teacher("distilbert"), folder=other)
    words = ("--task", "retrieval", "--model", folder, "--test", small)
    both = scored(tmp_path / "out", *words, "--documents-by", other)
    assert both["setup"] == f"documents by {other}"
    own = scored(tmp_path / "own", *words)["mean"]["test"]
    assert both["mean"]["test"] != own
    wide = tiny_teacher("electra")
    line = refused(*words, "--out", tmp_path / "no", "--documents-by", wide)
    assert "vectors have 32 numbers" in line and "projection" in line
    assert not (tmp_path / "no").exists()


def test_a_query_is_no_answer_to_itself() -> None:
    assert without_itself("b", ["a", "b", "c"]) == ["a", "c"]


def test_an_answer_that_is_not_in_the_corpus_is_reported(folder: Path, tmp_path: Path) -> None:
    small = collection(tmp_path / "small")
    words = ("--task", "retrieval", "--model", folder, "--test", small)
    with (small / "qrels.tsv").open("a") as file:
        file.write("q0\tlost\t1\nq0\tgone\t0\n")
    printed = "small: 1 relevant documents are not in the corpus, such as 'lost'"
    assert printed in done(*words, "--out", tmp_path / "out").replace("\n", " ")


def reranker(base: Path, folder: Path) -> Path:
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(base), num_labels=1, device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )
    return folder


def test_rerank_by_pairs_and_by_vectors(
    folder: Path, small: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Pairs are ordered as by the library's CrossEncoder, vectors as in retrieval."""
    from sentence_transformers import CrossEncoder

    base = tiny_teacher("bert", "classification", ("score",))
    cross = reranker(base, tmp_path / "cross")
    words = ("--task", "rerank", "--test", small, "--candidates-by", folder, "--depth", 5)
    result = scored(tmp_path / "out", *words, "--model", folder, "--model", cross)
    by_vectors, by_pairs = (each["test"] for each in result["seeds"])
    alone = scored(tmp_path / "all", *words[:1], "retrieval", *words[2:4], "--model", folder)
    first = [name for name in alone["mean"]["test"] if name != "recall_100"]
    read = read_collection(small)
    texts = dict(read.documents())
    lines, best = [], 0.0
    model = CrossEncoder(str(cross), device="cpu")
    for query, text in read.queries.items():
        names = list(texts)[:7]
        lines += [f"{query} Q0 {name} {n} {-n} run" for n, name in enumerate(names, 1)]
        scores = model.predict([(text, texts[name]) for name in names[:5]])
        place = [names[n] for n in np.argsort(-scores, kind="stable")]
        found = [n for n, name in enumerate(place, 1) if name in (read.judgements or {})[query]]
        best += 1 / min(found) if found else 0
    path = tmp_path / "first.run"
    path.write_text("\n".join(lines) + "\n")
    words = ("--task", "rerank", "--test", small, "--candidates", path, "--depth", 5)
    again = scored(tmp_path / "run", *words, "--model", cross)["mean"]["test"]
    assert again["mrr_10"] == pytest.approx(best / len(read.queries))
    assert by_pairs != by_vectors and set(by_vectors) == {"primary", *first[1:]} | set(first)


def test_damaged_collections_are_one_line(small: Path, folder: Path, tmp_path: Path) -> None:
    def printed(change: Callable[[Path], object]) -> str:
        made = collection(tmp_path / f"c{len(list(tmp_path.iterdir()))}", size=6)
        change(made)
        words = ("--task", "retrieval", "--model", folder, "--test", made)
        return refused(*words, "--out", tmp_path / "out")

    assert "cannot be read" in printed(lambda made: (made / "corpus.jsonl").unlink())
    twice = [{"_id": "a", "text": "x"}] * 2
    assert "line 2: duplicate id 'a'" in printed(lambda made: write(made / "corpus.jsonl", twice))
    numbered = [{"_id": "a", "text": "x", "title": 3}]
    line = printed(lambda made: write(made / "corpus.jsonl", numbered))
    assert "line 1: expected a string as title, got 3; correct the line" in line
    assert "expected an _id" in printed(lambda made: write(made / "queries.jsonl", [{"text": "x"}]))
    assert "expected text in `text`" in printed(
        lambda made: write(made / "queries.jsonl", [{"_id": "q0", "text": " "}])
    )
    assert "no query of queries.jsonl has a document" in printed(
        lambda made: judge(made / "qrels.tsv", {"q0": {"d0": 0}, "other": {"d0": 1}})
    )
    assert "expected a whole number" in printed(
        lambda made: (made / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\thigh\n")
    )
    assert "has no judgements (qrels.tsv)" in printed(lambda made: (made / "qrels.tsv").unlink())
    words = ("--task", "rerank", "--model", folder, "--test", small, "--out", tmp_path / "out")
    run_file = tmp_path / "bad.run"
    for text, message in (
        ("q0 d0 1\n", "line 1: expected `query Q0 document rank score name`"),
        ("q0 Q0 d0 1 nan run\n", "line 1: expected `query Q0 document rank score name`"),
        ("q0 Q0 d0 1 2.5 x\n", "has no candidates for 12 of 13 queries"),
    ):
        run_file.write_text(text)
        assert message in refused(*words, "--candidates", run_file)
    lines = [f"{name} Q0 nowhere 1 2.5 x" for name in read_collection(small).queries]
    run_file.write_text("\n".join(lines))
    line = refused(*words, "--candidates", run_file)
    assert f"lists 1 document not in {small}, such as 'nowhere'" in line


def test_texts_that_are_cut_are_counted(
    folder: Path, small: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Truncated texts are counted with the prompt; without truncation nothing is printed."""
    texts = ["lamp", "the old lamp of the keeper " * 9, "lamp " * 60]
    embedder = Embedder(str(folder), 16)
    embedder.vectors(texts, "query")
    embedder.vectors(texts[:1])
    assert embedder.cuts.note() == "2 of 4 texts cut to 16 tokens"
    scorer = PairScorer(str(reranker(tiny_teacher("bert", "classification", ("score",)),
                                     tmp_path / "cross")), 16)  # fmt: skip
    scorer.scores([(texts[0], texts[0]), (texts[0], texts[1])])
    assert scorer.cuts.note() == "1 of 2 texts cut to 16 tokens"
    words = ("--task", "retrieval", "--model", folder, "--test", small)
    assert "tokens" not in done(*words, "--out", tmp_path / "a")
    cut = done(*words, "--max-length", 8, "--out", tmp_path / "b")
    read = len(read_collection(small).queries) + len(dict(read_collection(small).documents()))
    assert re.search(rf"{re.escape(str(folder))}: \d+ of {read} texts cut to 8 tokens", cut)
