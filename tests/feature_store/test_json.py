"""`--json`: every command reports the same facts as JSON as in its text output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from teachonce.feature_store.cli import main
from teachonce.feature_store.output import Output, printed
from teachonce.store import open_store
from tests.making.stores import features_of, make_store


def facts(*arguments: object, code: int = 0) -> Any:
    """Run a command and return its JSON, which must be the whole stdout."""
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_it(name: str) -> None:
    assert "--json" in {option for each in main.commands[name].params for option in each.opts}


def test_copies_tell_what_was_written(store: Path, tmp_path: Path) -> None:
    tokens = open_store(store).meta["tokens"]
    copied = facts("convert", store, tmp_path / "b.h5", "--codec", "small")
    assert (copied["sequences"], copied["tokens"], copied["codec"]) == (24, tokens, "small")
    assert copied["bytes_on_disk"]["total"] == (tmp_path / "b.h5").stat().st_size
    make_store(tmp_path / "other.zarr", features_of(), parts=3)
    merged = facts("merge", store, tmp_path / "other.zarr", tmp_path / "c.zarr")
    assert (merged["sequences"], merged["parts"]) == (60, 5)
    assert merged["content"] == open_store(tmp_path / "c.zarr").manifest.content()
    assert facts("seal", store)["finished_before"] is True


def test_damage_is_reported_before_the_error(store: Path, tmp_path: Path) -> None:
    assert facts("verify", store)["sound"] is True
    path = tmp_path / "a.zarr"
    shutil.copytree(store, path)
    shard = path / "parts/1/token/end/c/0"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    found = facts("verify", path, code=1)
    assert found["sound"] is False and "part 1: array token/end" in found["problems"][0]
    mended = facts("repair", path)
    assert (
        mended["parts_left"] == 1 and "repeat the command that made the store" in mended["advice"]
    )
    assert Path(mended["quarantine"]).is_dir() and mended["undo"]


def test_a_sequence_is_reported_whole(store: Path) -> None:
    record, shown = open_store(store)[17], facts("show", store, 17, "--view", 1)
    assert shown["texts"] == [record.text] and shown["sequence"] == 17
    for number, token in enumerate(shown["tokens"]):
        assert token["id"] == record.token_ids[number]
        assert token["masked"] == record.views[1].mask[number]
        best = [each["probability"] for each in token["best"]]
        assert best == sorted(best, reverse=True) and len(best) == 3
        if not record.special[number]:
            begin, end = token["characters"]
            assert record.text[begin:end] == token["text"]


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    @printed
    def command() -> Any:
        yield Output({"a": [float("nan"), 1.5]}, ["for people"])
        yield Output({"b": {"c": float("-inf")}}, ["and more"])

    command(as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
    command(as_json=False)
    assert capsys.readouterr().out == "for people\nand more\n"
