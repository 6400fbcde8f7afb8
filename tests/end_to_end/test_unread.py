"""A dump and `info` print which features the default losses do not read, and the list is
correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.info import read_by_default
from teachonce.student_train.arguments import default_losses
from teachonce.student_train.losses.registry import features_of, losses_for
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok
from tests.making.dumps import write_corpus
from tests.making.models import Teachers

STATES = ("--hidden", "mean", "--attention", "mean")


def dump(teacher: Path, folder: Path, *more: str) -> tuple[Path, str]:
    """Dump a few texts; return the store and the output."""
    words = ("--model", teacher, "--corpus", write_corpus(folder / "a.txt", 8), "--device", "cpu")
    return folder / "a.zarr", ok(teacher_dump, *words, "--out", folder / "a.zarr", *more)


@pytest.mark.parametrize(
    ("teacher", "more", "given", "unread"),
    [
        (("bert",), (), {}, "--logits none --attention none"),
        (("bert",), ("--hidden", "none", "--attention", "none"), {}, ""),
        (("gpt2",), (), {"student": "llama:16x1x2"}, ""),
        (("gpt2",), STATES, {"student": "llama:16x1x2"}, "--hidden none --attention none"),
        (("distilbert", "classification", ("a", "b")), (), {}, "--attention none"),
    ],
)
def test_a_dump_says_what_no_default_loss_reads(
    teacher: tuple[Any, ...],
    more: tuple[str, ...],
    given: dict[str, str],
    unread: str,
    tiny_teacher: Teachers,
    tmp_path: Path,
) -> None:
    path, said = dump(tiny_teacher(*teacher), tmp_path, *more)
    with open_store(path) as store:
        kind = store.task.output_kind if store.task else None
        losses = losses_for(kind, default_losses(given, [store]))
        assert set(features_of(losses)) == read_by_default(store.features)
    lines = (*said.splitlines(), *ok(feature_store, "info", path).splitlines())
    found = [line for line in lines if line.startswith("unread")]
    assert len(found) == (2 if unread else 0)
    for line in found:
        also = ", and leave --head out" if "--logits none" in unread else ""
        advice = f"to dump without them, give {unread}{also}"
        assert line.endswith(f"B, which no default loss of student-train reads; {advice}")
    if unread:  # the suggested options work
        (tmp_path / "again").mkdir()
        without = dump(tiny_teacher(*teacher), tmp_path / "again", *more, *unread.split())[1]
        assert "unread" not in without
