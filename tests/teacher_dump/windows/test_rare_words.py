"""Words are counted in the corpus; rare words are masked more often, equally for every teacher."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from teachonce.store import open_store
from teachonce.store.extras.word_counts import WordCounts
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.windows import masked_views
from teachonce.teacher_dump.windows.masked_views import words_of
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.texts import ENGLISH


def test_words_are_counted(tmp_path: Path) -> None:
    texts = ["Один, two two", "  ", "one\ud800two don't\n", "don't"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = masked_views.count_words(Corpus.open([str(path)]))
    expected = {"Один": 1, ",": 1, "two": 3, "one": 1, "\ufffd": 1, "don't": 2}
    assert found.counts == expected


def test_every_source_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source of a corpus is counted in part, so no language is missing from the counts."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} {name}\n" * (1 if name == "c" else 50))
    monkeypatch.setattr(masked_views, "COUNTED_WORDS", 23)
    corpus = Corpus.open([str(tmp_path)])
    found = masked_views.count_words(corpus)
    assert found.counts == {"a": 8, "b": 8, "c": 2}  # whole texts, at least 23 // 3 words
    assert found == masked_views.count_words(corpus)


def test_teachers_with_other_tokens_read_the_same_masks(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 40, ENGLISH)
    kept = {"views": 2, "mask_words": "rare", "logits": "none", "attention": "none"}
    one, two = (
        open_store(dumped(tiny_teacher(kind), corpus, tmp_path / f"{kind}.zarr", **kept))
        for kind in ("bert", "deberta")
    )
    counts = WordCounts.stored(one)
    assert counts and counts == WordCounts.stored(two)
    masked, alike = [], 0
    for left in one:
        right = two[left.index]
        assert left.text == right.text
        spans = left.views[1].spans
        np.testing.assert_array_equal(spans, right.views[1].spans)
        masked += [left.text[begin:end] for begin, end, _ in spans]
        alike += len(left.token_ids) == len(right.token_ids)
    assert alike < len(one) == 40
    every = [word for record in one for word in words_of(record.text)]
    assert counts.of(masked).mean() < 0.8 * counts.of(every).mean()
