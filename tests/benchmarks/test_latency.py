"""The tables of students: sizes, times, decoders and sentence embeddings, with tiny models.

- The tables of sizes and times of students, with tiny models.
- Decoders of each start and loss are trained, scored and listed in a table.
- The table of students of sentence embeddings, with a tiny teacher and tiny data.
"""

import json
from pathlib import Path

import pytest

from benchmarks import latency
from benchmarks.quality import decoders, embedding_peers, embedding_students
from tests.end_to_end.support import Words, ok, refused
from tests.making.models import Teachers
from tests.making.sentence_folders import mean_embedder
from tests.making.texts import ENGLISH, SLOVAK


@pytest.mark.apart
def test_latency_of_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = ("bert:64x4x4", 300), ("bert:64x2x4", 300)
    monkeypatch.setattr(latency, "TEACHER", teacher)
    monkeypatch.setattr(latency, "STUDENTS", (("bert:16x1x2", 50), student))
    said = ("30", "", "57 (phone)", "")
    others = {"A source": (teacher, {student: said, ("bilstm:8,16", 300): said})}
    monkeypatch.setattr(latency, "OTHERS", others)
    results = tmp_path / "RESULTS.md"
    ok(latency.main, "--batch-size", 1, "--length", 32, "--results", results)
    rows = [
        line.strip("| ").split(" | ")
        for line in results.read_text().splitlines()
        if line.startswith("| bert:")
    ]
    assert [cells[:2] for cells in rows] == [
        ["bert:64x4x4", "300"], ["bert:16x1x2", "50"], ["bert:64x2x4", "300"],
    ]  # fmt: skip
    fewer = [float(cells[3]) for cells in rows]
    assert fewer[0] == 1 < fewer[2] < fewer[1]
    assert all(len(cells) == len(latency.HEAD) for cells in rows)
    others_rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in results.read_text().splitlines()
        if line.startswith("| A source")
    ]
    assert [cells[1] for cells in others_rows] == ["bert:64x2x4", "bilstm:8,16"]
    for cells in others_rows:
        assert len(cells) == len(latency.OF_OTHERS)
        assert [cells[place] for place in (5, 7, 9, 11)] == list(said)
    assert others_rows[0][4] == rows[2][3]


def test_a_row_of_another_source() -> None:
    found = {
        "parameters": 5e6, "disk_bytes": 2**21,
        "ratio": {"parameters": 2, "cpu": {"sentence_ms": 3, "batch_ms": 4}},
    }  # fmt: skip
    row = latency.row_of_other("a", ("bert:8x2x2", 1000), ("b", "c", "d", "e"), found)
    assert row == ["a", "bert:8x2x2", "1,000", 5.0, 2, "b", 2.0, "c", 3, "d", 4, "e"]


def test_sizes_on_disk_are_in_the_papers_unit() -> None:
    """Kolesnikova et al. 2022, Table 3: "Mem, MB" of 177.9M numbers of 4 bytes is 679, so MiB."""
    shape = latency.TEACHER
    parameters, published, *_ = latency.PUBLISHED[shape]
    found = {
        "parameters": parameters * 1e6, "disk_bytes": parameters * 1e6 * 4,
        "cpu": {f"{one}_{other}": 1 for one in ("batch", "sentence") for other in latency.FIGURES},
    }  # fmt: skip
    for cells, heads in (
        (latency.compared_row(shape, found), latency.COMPARED_HEAD),
        (latency.row(*shape, found), latency.HEAD),
    ):  # fmt: skip
        assert cells[heads.index("MiB on disk")] == pytest.approx(published, abs=0.5)


def rows_of(results: Path) -> list[list[str]]:
    """Read the cells of all lines of tables that hold figures."""
    lines = [line for line in results.read_text().splitlines() if line.startswith("| ")]
    return [cells for line in lines if "---" not in (cells := line.strip("| ").split(" | "))]


@pytest.mark.apart
def test_decoders_of_each_start_and_loss(
    tiny_teacher: Teachers, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "BOOKS", {"choosing": 0, "scored": 1000})
    monkeypatch.setattr(decoders, "LENGTH", 1000)
    monkeypatch.setattr(decoders, "BATCH", 256)
    results = tmp_path / "RESULTS.md"
    given = ("--work", tmp_path / "w", "--model", tiny_teacher("gpt2"), "--corpus", corpus)
    small = ("--stored", 3000, "--vocab", "300", "--student", "llama:16x1x2", "--tokens", 600)
    arms = ("--arms", "vocab, next;vocab, default", "--rates", "1e-3,2e-3")
    ok(decoders.main, *given, *small, *arms, "--seeds", 2, "--results", results)
    head, plain, default = rows_of(results)
    row, of_default = (dict(zip(head, cells, strict=False)) for cells in (plain, default))
    assert row["start"] == of_default["start"] == "vocab" and row["seeds"] == "2"
    assert (row["losses"], of_default["losses"]) == ("next=1", "default")
    assert row["lr"].endswith(" of 2") and 2 < float(row["bits a byte"].split()[0]) < 9
    assert "minus `next`" not in row
    gain = float(of_default["bits a byte"].split()[0]) - float(row["bits a byte"].split()[0])
    for column in ("minus `next`", "minus best `next`"):
        assert float(of_default[column].split()[0]) == pytest.approx(gain, abs=0.002)


@pytest.mark.apart
def test_students_are_trained_and_scored_with_the_teacher(
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
    model = mean_embedder(tiny_teacher("bert"), tmp_path / "m")
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
