"""The demo with a tiny teacher and a few steps: the same functions, less work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.demo import compare
from benchmarks.demo.compare import Settings, demo, held_out_texts
from benchmarks.demo.measure import encode, sentence_vectors, similarities, spearman
from benchmarks.demo.table import show
from store import open_store
from support.errors import UserError
from tests.texts import ENGLISH, FRENCH, GERMAN


@pytest.fixture(scope="module")
def settings(
    tiny_teacher: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    folder = tmp_path_factory.mktemp("demo")
    corpus = folder / "lines.txt"
    lines = [f"{a} {b}" for a in ENGLISH + GERMAN for b in FRENCH + GERMAN[:2]]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Settings(
        out=folder / "out",
        model=str(tiny_teacher("bert")),
        corpus=str(corpus),
        tokens=4000,
        max_length=96,
        vocab="200",
        student="16x1x2",
        steps=6,
        batch_tokens=256,
        sentences=12,
    )


def test_a_demo_and_another_over_it(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_matplotlib:
        without_matplotlib.setattr(compare, "find_spec", {}.get)
        first = demo(settings)
    assert not settings.picture.exists()
    assert "pip install -e '.[demo]'" in capsys.readouterr().out
    stray = settings.out / "distilled" / "left-over"
    stray.touch()
    comparison = demo(settings)
    assert not stray.exists()
    assert settings.picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    names = [model.name for model in comparison.models]
    assert names == ["teacher", "before training", "distilled", "MLM only"]
    teacher, start, distilled, plain = comparison.models
    assert teacher.agreement == 1.0 and len(teacher.similarities) == 12 * 11 // 2
    assert start.parameters == distilled.parameters == plain.parameters < teacher.parameters
    assert distilled.agreement != plain.agreement
    assert [m.agreement for m in comparison.models] == [m.agreement for m in first.models]
    for name, rows in comparison.curves.items():
        assert [row["step"] for row in rows if "mlm" in row] == list(range(1, 7))
        assert ("hidden" in rows[0]) == (name == "distilled")
    show(comparison)
    assert "MLM only" in capsys.readouterr().out


def test_held_out_texts_come_after_the_dumped_ones(settings: Settings) -> None:
    if not settings.store.exists():
        demo(settings)
    store = open_store(settings.store)
    lines = Path(settings.corpus).read_text(encoding="utf-8").splitlines()
    texts = held_out_texts(store, settings.corpus, 12)
    assert len(texts) == 12 and min(map(lines.index, texts)) > store[-1].document
    assert not set(texts) & set(store.texts())


def test_a_corpus_without_a_rest_is_refused(settings: Settings, tmp_path: Path) -> None:
    greedy = replace(settings, out=tmp_path, tokens=1_000_000)
    with pytest.raises(UserError, match="--tokens"):
        demo(greedy)
    assert not (tmp_path / "distilled").exists()


def test_vectors_leave_out_embeddings_and_padding(tiny_teacher: Callable[..., Path]) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = tiny_teacher("bert")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = list(ENGLISH[:5])
    found = encode(model.eval(), tokenizer, texts, 128, "test").vectors
    with torch.no_grad():
        alone = [
            model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
            for text in texts
        ]
    wanted = [torch.stack(one.hidden_states[1:]).mean((0, 1, 2)).numpy() for one in alone]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    ones = torch.ones(1, 2, dtype=torch.long)
    states = [torch.full((1, 2, 3), value) for value in (9.0, 1.0, 3.0)]
    assert sentence_vectors(states, ones).tolist() == [[2.0, 2.0, 2.0]]


def test_similarities_do_not_see_what_all_vectors_share() -> None:
    vectors = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    pairs = similarities(vectors)
    assert len(pairs) == 190 and np.abs(pairs).max() <= 1
    np.testing.assert_allclose(similarities(7 + 3 * vectors), pairs, atol=1e-4)
    assert spearman(pairs, pairs**3) == pytest.approx(1)
    assert spearman(pairs, -pairs) == pytest.approx(-1)
