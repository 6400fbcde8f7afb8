"""What a dump reports of its cost, and of features that the default losses do not read.

- `teacher-dump --plan` prints the cost of the dump, and leaves no file behind.
- A dump and `info` print which features the default losses do not read, and the list is correct.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.format.sequences import SEPARATOR
from teachonce.store.tools.info import bytes_on_disk, read_by_default
from teachonce.student_train.arguments import default_losses
from teachonce.student_train.losses.registry import features_read, losses_for
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job import estimate as estimating
from teachonce.teacher_dump.job.estimate import _Sample, estimate
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers

NEAR = 0.15

STATES = ("--hidden", "mean", "--attention", "mean")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ext", "kept", "limit"), [("zarr", 2000, None), ("h5", 60, None), ("zarr", 2000, 3000)]
)
def test_the_dump_takes_what_was_planned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ext: str, kept: int, limit: int | None,
) -> None:  # fmt: skip
    """With a plan from all documents, from a sample, and from the first documents."""
    monkeypatch.setattr(estimating, "DOCUMENTS", kept)
    corpus, out = write_corpus(tmp_path / "corpus.txt", 150), tmp_path / f"store.{ext}"
    options = dump_options(model, corpus, out, views=2, part_tokens=4000, limit=limit)
    planned = estimate(options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]
    dumped(model, corpus, out, views=2, part_tokens=4000, limit=limit)
    store, disk = open_store(out), bytes_on_disk(str(out))
    assert disk is not None and (planned.documents == 150 or limit)
    metadata = planned.bytes_by_feature["metadata"]
    features = sum(planned.bytes_by_feature.values()) - (metadata if ext == "h5" else 0)
    for printed, found in (
        (planned.tokens, store.meta["tokens"]),
        (features, disk["features"]),
        (planned.total_bytes, disk["total"]),
    ):
        assert printed == pytest.approx(found, rel=NEAR)
    assert len(store.manifest.parts) <= planned.parts
    assert {"hidden/mean", "attention/mean", "logits", "mask"} <= planned.bytes_by_feature.keys()
    assert planned.exact == (kept > 150)
    assert 0 < planned.pass_seconds < planned.seconds
    assert not any("--limit" in line for line in planned.lines())
    week = replace(planned, seconds=7 * 24 * 3600.0, tokens=21_000_000)
    assert "night     --limit 1000000 takes about 8.0 h" in week.lines()


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ({"text_column": "long"}, [50_000]),
        ({"text_column": "long,short"}, [50_000, 4]),
        ({"text_column": "long", "student_column": "short"}, [50_000, 4]),
        ({"messages": "chat"}, [60_000]),
    ],
)
def test_long_documents_of_a_sample(
    tmp_path: Path, columns: dict[str, str], lengths: list[int]
) -> None:
    """Each text of a pair is cut separately. The tokens of a chat are from its messages."""
    long, corpus = "lamp" * 15_000, tmp_path / "corpus.jsonl"
    row = {"long": long, "short": "lamp", "chat": [{"role": "user", "content": long}]}
    corpus.write_text(json.dumps(row))
    (document,) = _Sample(Corpus.open([str(corpus)], **columns), None, None)
    assert [len(text) for text in document.text.split(SEPARATOR)] == lengths


def test_a_limit_counts_whole_documents(model: Path, tmp_path: Path) -> None:
    """Also if the tokenizer truncates texts, as some models' files require."""
    tokenizer, text = AutoTokenizer.from_pretrained(model), "the old lamp " * 60
    tokens = len(tokenizer(text)["input_ids"])
    tokenizer.backend_tokenizer.enable_truncation(64)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(f"{text}\n" * 20)
    assert _Sample(Corpus.open([str(corpus)]), tokenizer, 3 * tokens - 1).documents == 3


class Disk(NamedTuple):
    free: int


def test_a_disk_that_is_too_small_is_reported_before_anything_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = write_corpus(tmp_path / "corpus.txt", 20), tmp_path / "store.zarr"
    words = ("--model", model, "--corpus", corpus, "--out", out, "--device", "cpu", "--plan")
    said = ok(teacher_dump, *words, "--logits", "topk:8")
    says(said, "parts     at most 1", "hidden/mean", "per token", "time  ", "pays  ", "room  ")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1000))
    line = refused(teacher_dump, *words, "--logits", "topk:8")
    says(line, "1 kB free", "free some space, give an --out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_only_the_first_process_of_torchrun_plans(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = write_corpus(tmp_path / "corpus.txt", 4), tmp_path / "store.zarr"
    words = ("--model", model, "--corpus", corpus, "--out", out, "--device", "cpu", "--plan")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ok(teacher_dump, *words) == ""
    monkeypatch.setenv("RANK", "0")
    says(ok(teacher_dump, *words), "time  ")


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
        assert set(features_read(losses)) == read_by_default(store.features)
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
