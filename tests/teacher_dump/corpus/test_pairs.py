"""Pairs of texts in two columns of a table, of every kind of table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachonce.store.format.sequences import SEPARATOR
from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError
from tests.teacher_dump.corpus.corpora import TABLES, write_table

ROWS: list[dict[str, Any]] = [
    {"two": "second", "n": "7", "one": "first", "gold": "yes"},
    {"two": "", "n": "8", "one": "alone", "gold": ""},
    {"two": "no first", "n": "9", "one": "", "gold": "no"},
    {"two": "", "n": "1", "one": "", "gold": "no"},
]


@pytest.mark.parametrize("suffix", TABLES)
def test_two_columns(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"a{suffix}", ROWS)
    corpus = Corpus.open([str(path)], "one,two", "gold")
    found = [(d.text.split(SEPARATOR), d.gold and d.gold.label) for d in corpus]
    want = [(["first", "second"], "yes"), (["alone", ""], None), (["", "no first"], "no")]
    assert found == want and corpus.empty_lines == 1
    assert corpus.identity()["text_column"] == "one,two"
    swapped = Corpus.open([str(path)], "two,one", "gold")
    assert next(iter(swapped)).text == f"second{SEPARATOR}first"
    assert swapped.identity() != corpus.identity()
    assert next(iter(Corpus.open([str(path)], "one"))).text == "first"


@pytest.mark.parametrize("suffix", TABLES)
def test_a_column_that_is_missing(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"a{suffix}", ROWS)
    printed = (
        rf"a{suffix}.*no column 'three'; its columns are '.*'one'.*; give one of them as --text"
    )
    for words in ("one,three", "three,one"):
        with pytest.raises(CorpusError, match=printed):
            Corpus.open([str(path)], words)


def test_a_row_that_lacks_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"one": "a", "two": "b"}\n{"one": "c"}\n')
    with pytest.raises(CorpusError, match=r"line 2: no column 'two'; its columns are 'one'"):
        list(Corpus.open([str(path)], "one,two"))


@pytest.mark.parametrize("words", ["one,two,n", "one,", ",two", "one,one", ","])
def test_columns_that_are_no_pair(tmp_path: Path, words: str) -> None:
    path = write_table(tmp_path / "a.csv", ROWS)
    with pytest.raises(CorpusError, match=rf"--text-column {words}: expected one column, or A,B"):
        Corpus.open([str(path)], words)


def test_what_cannot_be_pairs(tmp_path: Path) -> None:
    path, lines = write_table(tmp_path / "a.csv", ROWS), tmp_path / "b.txt"
    lines.write_text("one\n")
    with pytest.raises(CorpusError, match=r"b\.txt has no columns, so no pairs of texts"):
        Corpus.open([str(path), str(lines)], "one,two")
    with pytest.raises(CorpusError, match="--label-column two: is the column of the text"):
        Corpus.open([str(path)], "one,two", "two")
    for suffix in TABLES:
        rows = [*ROWS, {**ROWS[0], "two": f"a{SEPARATOR}b"}]
        with pytest.raises(CorpusError, match=r"(line|row) \d.*'two' holds the control.*U\+001F"):
            list(Corpus.open([str(write_table(tmp_path / f"c{suffix}", rows))], "one,two"))
