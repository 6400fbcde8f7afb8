"""The table of students of sentence embeddings, with a tiny teacher and tiny data."""

import json
from pathlib import Path

import pytest

from benchmarks.quality import embedding_peers, embedding_students
from tests.end_to_end.support import Words, ok, refused
from tests.making.models import Teachers
from tests.making.sentence_folders import modules, normalize, pooling
from tests.making.texts import ENGLISH, SLOVAK


@pytest.mark.apart
def test_students_are_trained_and_scored_beside_the_teacher(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    for name in ("text", "sts"):
        (data / name).mkdir(parents=True)
    lines = [f"{one} {two}" for one, two in zip(ENGLISH, ENGLISH[1:], strict=False)]
    (data / "text" / "a.txt").write_text("\n".join([*lines, *SLOVAK, "Short."]), "utf-8")
    pairs = [f"{a}\t{b}\t{n % 6}" for n, (a, b) in enumerate(zip(ENGLISH, SLOVAK, strict=False))]
    (data / "sts" / "own.tsv").write_text("\n".join(["text_a\ttext_b\tscore", *pairs]), "utf-8")
    monkeypatch.setattr(embedding_students, "TEXTS", {"text/a.txt": 30})
    monkeypatch.setattr(embedding_students, "OF_WORDS", 10)
    monkeypatch.setattr(embedding_students, "PASSAGE", 3)  # fewer words than a document has
    monkeypatch.setattr(embedding_peers, "LAYERS", (1,))
    monkeypatch.setattr(embedding_peers, "find_spec", lambda name: None)  # Model2Vec apart
    monkeypatch.setattr(embedding_students, "TABLES", ("own",))
    searched = data / "retrieval" / embedding_students.SEARCHED
    searched.mkdir(parents=True)
    rows_of = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate(ENGLISH)]
    (searched / "corpus.jsonl").write_text("\n".join(rows_of), "utf-8")
    (searched / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": ENGLISH[0]}), "utf-8")
    (searched / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\t0\t1\n", "utf-8")
    behind = (pooling("mean"), normalize())
    model = modules(*behind, base=tiny_teacher("bert"), folder=tmp_path / "m")
    words: Words = ("--work", tmp_path / "work", "--model", model, "--data", data, "--seeds", 2)
    words += ("--students", "static:8@5k,16x1x2@300", "--epochs", 1, "--results", tmp_path / "R.md")
    ok(embedding_students.main, *words)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (tmp_path / "R.md").read_text().splitlines()
        if line.startswith(("| teacher", "| static", "| 16x", "| sentence-"))
    ]
    peer = "sentence-transformers, layers 2 of the teacher, 0.5 epochs"
    assert [row[0] for row in rows] == ["teacher", peer, "static:8@5k", "16x1x2@300"]
    assert rows[0][-3] == "100 %" and all(row[-3].endswith("%") for row in rows)
    assert float(rows[0][5]) == 1 and float(rows[0][6]) == 1  # the query is a document
    assert " ± " in rows[2][3] and rows[2][3] == rows[2][4]  # a single table, which is the mean
    corpus = (tmp_path / "work" / "corpus.txt").read_text("utf-8").splitlines()
    documents = list(dict.fromkeys(embedding_students.of_documents(searched)))
    assert corpus[-len(documents) :] == documents and ENGLISH[1] in documents
    corpus = corpus[: -len(documents)]
    texts, drawn = corpus[:-10], corpus[-10:]
    assert len(texts) == len(set(texts)) <= 30 and "Short." not in texts
    assert all(2 <= len(text.split()) <= 8 for text in drawn)
    line = refused(embedding_students.main, *words, "--epochs", 2)
    assert "static-8@5k-0" in line and "epochs" in line
