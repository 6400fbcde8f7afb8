"""README's first command runs unchanged: model and corpus come from a hub, a server on loopback."""

from __future__ import annotations

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
from teachonce.store.tools.store_card import store_card
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.card import hub_id
from tests.docs.pages import ours
from tests.end_to_end.support import ROOT, STUDENT, ok
from tests.hub_contents import READER, Hub
from tests.hub_server import serving
from tests.making.models import Teachers
from tests.making.texts import RUSSIAN

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
