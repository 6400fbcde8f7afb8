"""mteb:NAME is the main score of mteb, on a task defined here without a download."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from teachonce.downstream.tasks.sts import SentenceSimilarity
from tests.downstream.support import done, refused
from tests.downstream.tasks.test_sts import alike
from tests.making.models import Teachers
from tests.making.sentence_folders import modules, pooling


@pytest.fixture
def folder(tiny_teacher: Teachers, tmp_path: Path) -> Path:
    return modules(pooling("cls"), base=tiny_teacher("bert"), folder=tmp_path / "model")


def test_without_mteb_one_line_says_how_to_get_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    words = ("--task", "mteb:STS12", "--model", folder, "--out", tmp_path / "out")
    assert "pip install 'teachonce[mteb]'" in refused(*words)


def local_task(pairs: Path) -> Any:
    """An mteb task with a local table as its data."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    rows = SentenceSimilarity().read(pairs)

    class LocalSTS(AbsTaskSTS):  # type: ignore[misc]  # untyped where mteb is not installed
        min_score, max_score = 0, 5
        metadata = TaskMetadata(
            name="LocalSTS",
            dataset={"path": "nowhere/local", "revision": "0"},
            description="Sentences with and without the same animal.",
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )

        def load_data(self, **ignored: Any) -> None:
            columns = {
                "sentence1": [row.text_a for row in rows],
                "sentence2": [row.text_b for row in rows],
                "score": [row.score for row in rows],
            }
            self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
            self.data_loaded = True

    return LocalSTS


def test_the_main_score_of_a_local_task(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mteb")
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "cache"))
    pairs = alike(tmp_path / "test.tsv", 24, 0)
    registry = sys.modules["mteb.get_tasks"]._TASKS_REGISTRY
    monkeypatch.setitem(registry, "LocalSTS", local_task(pairs))
    out = tmp_path / "out"
    said = done("--task", "mteb:LocalSTS", "--model", folder, "--out", out)
    rows, model = SentenceSimilarity().read(pairs), SentenceTransformer(str(folder), device="cpu")
    sides = [model.encode([getattr(row, side) for row in rows]) for side in ("text_a", "text_b")]
    cosines = model.similarity_pairwise(*sides)
    expected = spearmanr([row.score for row in rows], cosines).statistic
    assert "cosine_spearman" in said and f"{100 * expected:.2f}" in said
    assert "mteb:LocalSTS" in done("--task", "table", out)
    words = ("--model", folder, "--out", tmp_path / "no")
    assert "mteb has no such task" in refused("--task", "mteb:Nonsense", *words)
