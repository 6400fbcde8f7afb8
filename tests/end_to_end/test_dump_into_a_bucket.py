"""The command writes the same store into a bucket as to a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from teachonce.store import open_store
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok, refused
from tests.making.models import Teachers
from tests.rough_network import BUCKET, running_s3

GROWN = f"s3://{BUCKET}/grown.zarr"
URL = f"s3://{BUCKET}/store.zarr"


@pytest.mark.slow
def test_a_dump_into_a_bucket(tmp_path: Path, tiny_teacher: Teachers, corpus: Path) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    words: list[str | Path | int] = [
        "--model", tiny_teacher("bert"), "--corpus", corpus, "--limit", 600,
    ]  # fmt: skip
    words += ["--logits", "topk:4", "--no-weights", "--device", "cpu"]
    with running_s3():
        said = ok(teacher_dump, *words, "--out", URL)
        assert f"student-train --store {URL}" in said
        assert "was finished before" in ok(teacher_dump, *words, "--out", URL)
        line = refused(teacher_dump, *words, "--out", URL, "--shard", "0/2")
        assert "disk that all processes see" in line
        far = open_store(URL).manifest.content()
        ok(teacher_dump, *words, "--limit", 900, "--out", GROWN, "--grow-from", URL)
        grown = open_store(GROWN).manifest.content()
    near, more = tmp_path / "near.zarr", tmp_path / "more.zarr"
    ok(teacher_dump, *words, "--out", near)
    assert open_store(near).manifest.content() == far
    ok(teacher_dump, *words, "--limit", 900, "--out", more, "--grow-from", near)
    assert open_store(more).manifest.content() == grown
