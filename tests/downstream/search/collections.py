"""A small collection in the layout of BEIR, with sentences about their titles."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.making.texts import SENTENCES

Rows = list[dict[str, Any]]


def collection(folder: Path, judged: bool = True, size: int = 40) -> Path:
    """Make a query of every third sentence, cut in half: the sentence has grade 2, the next one
    grade 1."""
    folder.mkdir()
    texts = SENTENCES[:size]
    corpus = [{"_id": f"d{n}", "title": "On:", "text": text} for n, text in enumerate(texts)]
    queries = [
        {"_id": f"q{n}", "text": texts[n][: max(12, len(texts[n]) // 2)]}
        for n in range(0, len(texts) - 1, 3)
    ]
    write(folder / "corpus.jsonl", corpus)
    write(folder / "queries.jsonl", queries)
    if judged:
        grades = {
            row["_id"]: {f"d{row['_id'][1:]}": 2, f"d{int(row['_id'][1:]) + 1}": 1}
            for row in queries
        }
        judge(folder / "qrels.tsv", grades)
    return folder


def write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def judge(path: Path, grades: Mapping[str, Mapping[str, int]]) -> None:
    lines = [f"{q}\t{d}\t{grade}" for q, found in grades.items() for d, grade in found.items()]
    path.write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n", "utf-8")
