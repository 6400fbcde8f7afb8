"""Corpora that are edited while they are read, or between two readings of one command."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError
from tests.integrity.edited_corpora import EDITS, HARMLESS, KINDS, edited, write

LINES = [f"line {n} of the text" for n in range(3000)]
FILES = [kind for kind in KINDS if kind != "hf"]


def opened(path: Path) -> Corpus:
    """Open a corpus, check and describe it, as a dump does before it reads."""
    write(path, LINES)
    corpus = Corpus.open([str(path)])
    corpus.check()
    corpus.identity()
    return corpus


@pytest.mark.parametrize("suffix", FILES)
def test_a_line_written_over_while_it_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    corpus = opened(path)
    documents = iter(corpus)
    list(islice(documents, 10))
    EDITS["a line written over"][1](path, [*LINES[:-1], "line 2999 of the TEXT"])
    with pytest.raises(
        CorpusError,
        match=r"a\.\w+: was changed while it was being read, from .* remove it, and run",
    ):
        list(documents)
        corpus.check_unchanged()


@pytest.mark.parametrize("suffix", FILES)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_behind_what_is_read(tmp_path: Path, suffix: str, edit: str) -> None:
    """An edit after the last text read (`--limit`) is refused, since the hash is recorded."""
    path = tmp_path / f"a{suffix}"
    corpus = opened(path)
    list(islice(iter(corpus), 10))
    changed = [*LINES[:-5], "another end"] if edit not in HARMLESS else LINES
    EDITS[edit][1](path, changed)
    if edit in HARMLESS or suffix == ".parquet":  # each reading of Parquet starts with a hash
        corpus.check_unchanged()
        return
    with pytest.raises(CorpusError, match=r"was changed while it was being read|cannot be read"):
        corpus.check_unchanged()


@pytest.mark.parametrize("edit", sorted(set(EDITS) - set(HARMLESS)))
def test_a_library_reads_a_file_that_is_edited(tmp_path: Path, edit: str) -> None:
    path = tmp_path / "a.parquet"
    write(path, LINES)
    corpus = Corpus.open([str(path)])
    documents = iter(corpus)
    next(documents)
    EDITS[edit][1](path, ["other text", *LINES[1:]])
    with pytest.raises(CorpusError, match=r"was changed while it was being read|cannot be read"):
        corpus.identity()
        list(documents)
        corpus.check_unchanged()


def test_an_edit_that_is_taken_back(tmp_path: Path) -> None:
    """An edit that is reverted is found: the file equals the old one, but the texts read do not."""
    path = tmp_path / "a.txt"
    corpus = opened(path)
    EDITS["a line written over"][1](path, ["other text", *LINES[1:]])
    list(islice(iter(corpus), 10))
    EDITS["a line written over"][1](path, LINES)
    with pytest.raises(CorpusError, match="was changed while it was being read"):
        corpus.check_unchanged()


def test_what_was_read_whole_may_change_or_go(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    corpus = opened(path)
    assert len(list(corpus)) == len(LINES)
    path.write_text("other text\n")
    corpus.check_unchanged()
    path.unlink()
    corpus.check_unchanged()


def test_a_local_dataset(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", LINES)
    corpus = Corpus.open([f"hf:{tmp_path}"])
    corpus.check()
    documents = iter(corpus)
    next(documents)
    os.utime(tmp_path / "train.jsonl")
    corpus.identity()
    corpus.check_unchanged()
    write(tmp_path / "train.jsonl", LINES[:-1])
    with pytest.raises(CorpusError, match="the folder was changed while it was being read"):
        corpus.check_unchanged()


@pytest.mark.apart
def test_dumps_of_edited_corpora(tmp_path: Path) -> None:
    found = dict(edited(tmp_path, 6, 12))
    assert set(found.values()) == {"refused", "sound"}, found
