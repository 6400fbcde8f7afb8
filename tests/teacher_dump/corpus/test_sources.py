"""Sources that are not plain files: datasets of the hub and the docstrings of Python."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from teachonce.teacher_dump.corpus.documents import Corpus
from tests.teacher_dump.corpus.corpora import TEXTS, refusal, texts, write_table


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_hub_dataset_in_a_local_folder(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "name"
    folder.mkdir()
    rows = [{"n": i, "text": text} for i, text in enumerate(TEXTS)]
    write_table(folder / f"train{suffix}", rows)
    write_table(folder / f"test{suffix}", rows[:2])
    assert texts(f"hf:{folder}") == TEXTS
    assert texts(f"hf:{folder}:test") == TEXTS[:2]
    corpus = Corpus.open([f"hf:{folder}:test"])
    assert [document.text for document in corpus] == [document.text for document in corpus]
    (source,) = corpus.identity()["sources"]
    assert len(source.pop("sha256")) == 64
    assert source == {
        "kind": "hf",
        "name": "name",
        "config": None,
        "split": "test",
        "revision": None,
    }
    line = refusal(f"hf:{folder}:dev")
    assert "'dev'" in line and "check hf:NAME@CONFIG:SPLIT and the files in the folder" in line
    assert "no column 'body'; its columns are 'n', 'text'" in refusal(f"hf:{folder}", "body")
    assert "row 1: expected text in column 'n', got int 0" in refusal(f"hf:{folder}", "n")


def test_saved_data_sets_have_the_named_split(tmp_path: Path) -> None:
    """Neither a split nor a configuration that the folder lacks is ignored."""
    rows = Dataset.from_dict({"text": list(TEXTS)})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    assert texts(f"hf:{tmp_path}/one") == texts(f"hf:{tmp_path}/several:test") == TEXTS
    assert "is one data set without splits; leave :dev out" in refusal(f"hf:{tmp_path}/one:dev")
    assert "of several splits, 'test'; name one" in refusal(f"hf:{tmp_path}/several:dev")
    (file,) = (tmp_path / "one").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(TEXTS[1].encode(), b"\xff" * len(TEXTS[1].encode())))
    for source in (tmp_path / "one", f"hf:{tmp_path}/one"):
        assert "invalid start byte; save it again" in refusal(source)
    for name in ("one", "several"):
        line = refusal(f"hf:{tmp_path}/{name}@en:test")
        assert "`save_to_disk` stores no configurations; leave @en out" in line


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    message = refusal("hf:owner/name@config:test")
    assert "hf:owner/name@config:test: the hub cannot be reached" in message
    assert "check the network, or give a local file or folder" in message
    assert "has a dataset" in refusal(f"hf:{tmp_path}/nothing")


@pytest.mark.slow
def test_python_docs() -> None:
    modules = set(sys.modules)
    corpus = Corpus.open(["python-docs"])
    found = [document.text for document in corpus]
    assert all(name.startswith("encodings.") for name in set(sys.modules) - modules)
    assert len(found) > 5000 and sum(map(len, found)) > 500_000
    assert len(set(found)) == len(found)
    assert not any("\n" in text or "  " in text for text in found)
    assert "JSON (JavaScript Object Notation) <https://json.org> is a subset of" in " ".join(found)
    (source,) = corpus.identity()["sources"]
    assert source["documents"] == len(found)
    assert source["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
