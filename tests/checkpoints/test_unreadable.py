"""A damaged file of a checkpoint is named, whatever message the parsing library gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from teachonce.checkpoints.loading import load_config, load_network, load_tokenizer
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.unreadable import damaged_file
from teachonce.support.errors import UserError
from tests.making.models import Teachers

FLAWS: dict[str, Callable[[bytes], bytes]] = {
    "is empty": lambda data: b"",
    "is damaged (": lambda data: data[: len(data) // 2],
    "is not a JSON object": lambda data: b"[1, 2]",
    "is damaged (not UTF-8)": lambda data: b"\xff\xfe{}",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(
    tiny_teacher: Teachers, tmp_path: Path, name: str, flaw: str
) -> None:
    folder = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    assert damaged_file(folder) == ""
    (folder / name).write_bytes(FLAWS[flaw]((folder / name).read_bytes()))
    found = damaged_file(folder)
    assert found.startswith(f"{name} {flaw if name != FILES[-1] else 'is '}")
    model = ResolvedModel(str(folder), "mine")
    with pytest.raises(UserError) as caught:
        load_config(model)
        load_tokenizer(model)
        load_network(AutoModelForMaskedLM, model)
    assert str(caught.value) == f"model mine: cannot be loaded: {found}; copy the checkpoint again"


def test_sound_files_that_are_no_tokenizer(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert damaged_file(folder).startswith("tokenizer.json is damaged (")
    assert damaged_file(tmp_path / "missing") == ""
