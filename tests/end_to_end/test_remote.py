"""A hub and an object store, also over a rough network, serve dumps and trainings.

- README's first command runs unchanged: model and corpus come from a hub, a server on loopback.
- The command writes the same store into a bucket as to a disk.
- A training from an object store, over a network that loses three of ten answers.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import DatasetCard, ModelCard

from teachonce.checkpoints.names import ALIASES
from teachonce.store import open_store
from teachonce.store.containers import network
from teachonce.store.tools.store_card import store_card
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.card import hub_id
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.docs.pages import ours
from tests.end_to_end.support import ROOT, STUDENT, ok, refused
from tests.hub_contents import READER, Hub
from tests.hub_server import serving
from tests.making.models import Teachers
from tests.making.texts import RUSSIAN
from tests.rough_network import BUCKET, Weather, running_s3

CONFIG = "20231101.ru"
CARD = f"""---
configs:
- config_name: {CONFIG}
  data_files:
  - split: train
    path: {CONFIG}/train-*
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Iterator[Hub]:
    """Return a hub with a small model and a small corpus under the names in the preset
    `rubert-base`."""
    corpus = tmp_path_factory.mktemp("wikipedia")
    (corpus / CONFIG).mkdir()
    (corpus / "README.md").write_text(CARD)
    rows = {"title": [str(number) for number in range(40)], "text": (RUSSIAN * 40)[:40]}
    pq.write_table(pa.table(rows), corpus / CONFIG / "train-00000-of-00001.parquet")
    with serving() as hub:
        hub.add(f"models/{ALIASES['rubert-base'].id}", tiny_teacher("bert"))
        hub.add("datasets/wikimedia/wikipedia", corpus)
        yield hub


def first_command() -> list[str]:
    """Return the words of the first teacher-dump of README."""
    line = re.search(r"^teacher-dump .*rubert-base[^#\n]*", (ROOT / "README.md").read_text(), re.M)
    assert line is not None
    return line[0].split()


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command in a folder, in a separate process with its own environment."""
    found = ours(words)
    assert found is not None
    module = str(found[0].callback.__module__ if found[0].callback else "")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()
    }
    code = f"from {module} import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, *found[1]],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.apart
def test_readme_s_first_command_downloads_its_model_and_its_corpus(
    hub: Hub, tmp_path: Path
) -> None:
    printed = run(first_command(), tmp_path, hub.environment(tmp_path / "home", READER))
    assert "of 40 documents" in printed and "next: student-train --store store.zarr" in printed
    store = open_store(str(tmp_path / "store.zarr"))
    assert store[0].text == RUSSIAN[0]
    teacher, (source,) = store.identity["teacher"], store.identity["corpus"]["sources"]
    (newest,) = hub.repositories["datasets/wikimedia/wikipedia"].branches.values()
    assert source["name"] == "wikimedia/wikipedia" and source["config"] == CONFIG
    assert source["revision"].endswith(f"{newest:08x}") and len(teacher["revision"]) == 40
    assert hub_id(store) == ALIASES["rubert-base"].id
    weights = [each for each in hub.requests if each.startswith("GET /content/")]
    assert weights, "the weights came from the hub"
    words = ("--store", store.path, "--vocab", "300", "--steps", "2", "--out", tmp_path / "mine")
    ok(student_train, *words, *STUDENT)
    card = vars(ModelCard((tmp_path / "mine" / "README.md").read_text()).data)
    assert card["base_model"] == ALIASES["rubert-base"].id
    assert card["datasets"] == ["wikimedia/wikipedia"]
    of_store = vars(DatasetCard(store_card(store, "me/it", "store.zarr")).data)
    assert of_store["source_datasets"] == ["wikimedia/wikipedia"]


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


SHORT = (*STUDENT, "--vocab", 300, "--steps", 4, "--loss", "mlm=1,hidden=1,kl=1", "--eval-every", 2)


@pytest.mark.slow
def test_a_training_gives_the_same_student(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    monkeypatch.setattr(network, "FIRST_PAUSE", 0.01)
    cache = f"disk:{tmp_path / 'cache'},100MB"
    with running_s3() as s3:
        s3.put(store, "store.zarr")
        s3.weather = Weather({"reset": 0.3})
        ok(student_train, "--store", URL, "--out", tmp_path / "far", *SHORT, "--cache", cache)
        assert s3.weather.met["reset"] > 20
        s3.weather = Weather({"reset": 0.3})  # another training finds everything in the cache
        ok(student_train, "--store", URL, "--out", tmp_path / "again", *SHORT, "--cache", cache)
        assert s3.weather.met["reset"] < 20
        monkeypatch.setattr(network, "PATIENCE", 0.3)
        s3.weather = Weather({"503": 1.0}, lambda method, path: "parts/" in path)
        line = refused(student_train, "--store", URL, "--out", tmp_path / "none", *SHORT)
        assert "cannot be reached: parts/" in line and "damaged" not in line
    ok(student_train, "--store", store, "--out", tmp_path / "near", *SHORT)
    words = ("--store", store, "--out", tmp_path / "none", *SHORT, "--cache", cache)
    line = refused(student_train, *words)
    assert "is on this machine; leave --cache out" in line
    names = ("near", "far", "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert len(set(weights)) == 1
