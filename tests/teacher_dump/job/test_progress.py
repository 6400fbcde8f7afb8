"""The progress messages of a dump."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.progress import Progress
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers

LEAN = {"logits": "none", "attention": "none", "weights": False}  # the messages are the same
LINE = re.compile(r"part (\d+) .* tokens so far, about (\d+)% of all, [\d:]+ left")


@pytest.mark.parametrize("changes", [{}, {"stride": 8, "max_length": 24}, {"limit": 3000}])
def test_every_part_tells_its_share_and_the_time_left(
    tmp_path: Path, tiny_teacher: Teachers, changes: dict[str, int]
) -> None:
    corpus, said = write_corpus(tmp_path / "corpus.txt", 200), list[str]()
    options = dump_options(tiny_teacher("bert"), corpus, tmp_path / "a.zarr", **LEAN, **changes)
    dump(options, said.append)
    check_shares(said)


def check_shares(said: list[str]) -> None:
    found = [LINE.fullmatch(line) for line in said if line.startswith("part ")]
    shares = [int(match[2]) for match in found if match]
    assert len(shares) == len(found) >= 2 and shares == sorted(shares)
    assert shares[-1] >= 97 and abs(shares[0] - 100 / len(shares)) < 25


def test_what_is_new_of_a_grown_corpus_is_the_whole(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """When a corpus has grown, progress is relative to the new documents, not to the old store."""
    teacher, said = tiny_teacher("bert"), list[str]()
    changes = LEAN | {"stride": 8, "max_length": 24}
    before, grown = write_corpus(tmp_path / "before.txt", 150), tmp_path / "grown.txt"
    grown.write_text(before.read_text() + write_corpus(tmp_path / "more.txt", 350).read_text())
    dump(dump_options(teacher, before, tmp_path / "a.zarr", **changes))
    options = dump_options(teacher, grown, tmp_path / "b.zarr", **changes)
    dump(replace(options, grow_from=tmp_path / "a.zarr"), said.append)
    check_shares(said)


def test_a_long_part_tells_how_far_it_is(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachonce.teacher_dump.job.progress.EVERY", 0.0)
    corpus, said = write_corpus(tmp_path / "corpus.txt", 60), list[str]()
    options = dump_options(tiny_teacher("bert"), corpus, tmp_path / "a.zarr", batch_tokens=500)
    dump(options, said.append)
    lines = [line for line in said if line.startswith(("dump ", "part "))]
    found = [re.search(r"([\d,]+) (?:teacher )?tokens so far", line) for line in lines]
    tokens = [int(match[1].replace(",", "")) for match in found if match]
    assert len(tokens) == len(lines) >= 4 and tokens == sorted(tokens)
    assert re.fullmatch(
        r"dump      [\d,]+ teacher tokens so far, [\d,]+ tokens/s, about \d+% of all, [\d:]+ left",
        lines[0],
    )


def test_nobody_knows_the_end_of_what_was_not_read(tmp_path: Path) -> None:
    corpus = Corpus.open([str(write_corpus(tmp_path / "corpus.txt", 7))])
    for limit in (None, 50):
        with Progress(corpus, limit, False, lambda line: None) as progress:
            assert progress.total() == limit
    corpus.check()
    assert corpus.size(True) == 7
    texts = [document.text for document in corpus]
    assert corpus.size(False) == sum(map(len, texts))
