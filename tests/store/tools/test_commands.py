"""The commands: info, verify, convert, show."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models

from teachonce.feature_store.cli import main
from teachonce.store import open_store
from teachonce.store.tools.copy import convert
from tests.end_to_end.support import refused as refused_by
from tests.making.stores import (
    IDENTITY,
    LABELS,
    SMALL,
    begin,
    features_of,
    make_part,
    make_store,
    put_part,
    unfinished,
)

Made = Callable[..., Any]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


refused = partial(refused_by, main)


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_info(made: Made, ext: str) -> None:
    path, parts = made(ext)
    tokens = sum(int(part.token_counts.sum()) for part in parts)
    text = run("info", path).output
    assert f"36 sequences, {tokens:,} teacher tokens, 3 parts" in text and "topk:5" in text
    about = json.loads(run("info", path, "--json").output)
    assert about["tokens"] == tokens and about["teacher_weights"] == 2
    assert about["bytes_per_token_encoded"]["view0/hidden/mean"] == 39
    assert "no such file" in refused("info", "none.h5")


def test_bytes_of_states_of_any_name(tmp_path: Path) -> None:
    """Zarr has shards in a folder `c`, and a hidden state may have this name, too."""
    sizes = []
    for name in ("m", "c"):
        make_store(tmp_path / f"{name}.zarr", replace(SMALL, hidden=(name,)), parts=1)
        about = json.loads(run("info", tmp_path / f"{name}.zarr", "--json").output)
        sizes.append(about["bytes_by_feature"][f"view0/hidden/{name}"])
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_info_tells_features_and_teacher_apart(tmp_path: Path, ext: str) -> None:
    features = features_of(codec="exact", tier=None)
    sizes = []
    for name, rows in (("small", 8), ("large", 100_000)):
        path = tmp_path / f"{name}.{ext}"
        weights = {"embeddings": np.random.default_rng(0).normal(size=(rows, 4))}
        make_store(path, features, parts=1, weights=weights)
        about = json.loads(run("info", path, "--json").output)
        sizes.append(about["bytes_on_disk"])
        whole = path.stat().st_size if ext == "h5" else bytes_of(path)
        assert sizes[-1]["total"] == whole
        assert sizes[-1]["features"] / about["tokens"] == pytest.approx(
            about["feature_bytes_per_token_on_disk"], abs=0.01
        )
        if ext == "zarr":
            assert sizes[-1]["features"] == bytes_of(path / "parts")
    small, large = sizes
    assert small["features"] == pytest.approx(large["features"], rel=0.01)
    assert large["teacher"] - small["teacher"] > 500_000  # float16, which hardly compresses
    each = f"{large['features'] / about['tokens']:,.2f} bytes per teacher token"
    assert each in run("info", path).output


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_info_tells_the_corpus_to_people(tmp_path: Path) -> None:
    novels = {"kind": "file", "name": "novels.txt", "bytes": 12345, "sha256": "ab" * 32}
    wiki = {"kind": "hf", "name": "wiki", "config": None, "split": "train", "revision": "f1"}
    corpus = {
        "merged": [
            {"text_column": "body", "sources": [novels, wiki]},
            {"text_column": None, "sources": [{"kind": "file", "name": f"{n}.txt"} for n in "123"]},
        ]
    }
    make_store(
        tmp_path / "a.h5", features_of(tier=None), parts=1, identity=IDENTITY | {"corpus": corpus}
    )
    text = run("info", tmp_path / "a.h5").output
    assert "novels.txt (bytes 12,345, sha256 abababababab, column body)" in text
    assert "wiki (split train, revision f1, column body)" in text and "{" not in text
    assert all(f"{n}.txt" in text for n in "123")


def test_info_of_an_unfinished_store(tmp_path: Path) -> None:
    features = features_of(tier=None)
    unfinished(tmp_path / "a.h5", features)
    line = refused("info", tmp_path / "a.h5")
    assert "is not finished (1 part)" in line and line.endswith("with --allow-partial")
    line = refused("export", tmp_path / "a.h5", tmp_path / "a", "--to", "parquet")
    assert "is not finished (1 part)" in line and "partial" not in line  # it has no such option
    assert "(version 1, writing)" in run("info", "--allow-partial", tmp_path / "a.h5").output
    about = json.loads(run("info", "--allow-partial", "--json", tmp_path / "a.h5").output)
    assert about["bytes_on_disk"]["features"] > about["tokens"] * 37


def test_verify(made: Made, copy: Callable[..., Path]) -> None:
    result = run("verify", made("h5")[0])
    assert result.exit_code == 0 and "sound: 3 parts" in result.output
    path = copy("zarr")
    shard = path / "parts/2/token/end/c/0"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert "damaged: 1 problem" in refused("verify", path)
    text = run("verify", path).output
    assert "part 2: array token/end cannot be read" in text
    assert "feature-store verify" not in text  # it has just run


@pytest.mark.parametrize(("one", "other"), [("zarr", "h5"), ("h5", "zarr")])
def test_convert_between_formats(made: Made, tmp_path: Path, one: str, other: str) -> None:
    source, target = made(one)[0], tmp_path / f"b.{other}"
    assert "36 sequences" in run("convert", source, target).output
    first, second = open_store(source), open_store(target)
    assert first.identity == second.identity and first.features == second.features
    for a, b in zip(first.manifest.parts, second.manifest.parts, strict=True):
        assert a.counts == b.counts and a.number == b.number
        assert [e.sha256 for e in a.arrays.values()] == [e.sha256 for e in b.arrays.values()]
    assert run("verify", target).exit_code == 0
    line = refused("convert", source, target)
    assert "exists already" in line and "give another name, or remove what is there" in line


@pytest.mark.parametrize("name", ("text.h5", "text.zarr", "folder.h5", "folder.zarr"))
def test_convert_onto_what_is_no_store(made: Made, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.mkdir() if name.startswith("folder") else target.write_text("mine")
    line = refused("convert", made("h5")[0], target)
    assert "nothing was changed" in line and "another name, or remove what is there" in line


@pytest.mark.parametrize("tier", ("topk", "head", "tagging"))
@pytest.mark.parametrize("codec", ("default", "small"))
def test_recoding_equals_writing_with_the_codec(
    made: Made, tmp_path: Path, tier: str, codec: str
) -> None:
    source, target = made("h5", "exact", tier)[0], tmp_path / "b.h5"
    assert run("convert", source, target, "--codec", codec).exit_code == 0
    recoded, direct = open_store(target), open_store(made("h5", codec, tier)[0])
    assert recoded.manifest.parts == direct.manifest.parts
    assert "cannot become 'exact'" in refused("convert", target, "c.h5", "--codec", "exact")


def test_recoding_in_two_steps_adds_the_errors(made: Made, tmp_path: Path) -> None:
    source, _ = made("h5", "default")
    run("convert", source, tmp_path / "b.h5", "--codec", "small")
    before, after = open_store(source)[5].views[0], open_store(tmp_path / "b.h5")[5].views[0]
    maps = before.attention["mean"]
    changed = np.abs(maps - after.attention["mean"])
    assert changed.max() > 0 and (changed <= 5 * np.sqrt(maps) / 255 + 1e-4).all()
    assert (before.logits.ids == after.logits.ids).all()
    mean, deviation = open_store(source).calibration["mean"]
    peak = np.abs((before.hidden["mean"] - mean) / deviation).max(axis=1, keepdims=True)
    change = np.abs(before.hidden["mean"] - after.hidden["mean"]) / deviation
    assert change.max() > 0 and (change <= 1.002 * peak / 14).all()


def stop(items: Sequence[Any]) -> Any:
    yield items[0]
    raise KeyboardInterrupt


ZEROS = dict.fromkeys(("mean", "groups2.1"), (np.zeros(37), np.ones(37)))
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "calibration": ({"calibration": ZEROS}, "calibration/hidden/mean/mean differs"),
    "weights": ({"weights": {"pooler.bias": np.zeros(4)}}, "teacher/weights/pooler.bias differs"),
    "parts": ({}, "of part 0 differs"),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("codec", ("default", "small"))
def test_a_stopped_conversion_does_not_go_on_with_another_store(
    made: Made, tmp_path: Path, other: str, codec: str
) -> None:
    """A stopped conversion does not continue with another store of equal identity."""
    changes, printed = OTHER[other]
    source, target = made("zarr")[0], tmp_path / "b.h5"
    writer = begin(tmp_path / "other.h5", features_of(), **changes)
    for number in range(3):
        put_part(writer, number, make_part(features_of(), number + (other == "parts")))
    writer.seal()
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "other.h5", target, codec, progress=stop)
    before = target.read_bytes()
    line = refused("convert", source, target, "--codec", codec)
    assert f"started from another store than {source}" in line and printed in line
    assert target.read_bytes() == before
    convert(tmp_path / "other.h5", target, codec)
    assert run("verify", target).exit_code == 0


@pytest.mark.parametrize("tier", ("topk", "sample", "head"))
def test_show(tmp_path: Path, tier: str) -> None:
    features = features_of(tier=tier)
    vocabulary = {"[UNK]": 0} | {f"piece{n}": n for n in range(1, 1000)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    parts = make_store(tmp_path / "a.h5", features, parts=1, files=files)
    result = CliRunner().invoke(
        main, ["show", str(tmp_path / "a.h5"), "2", "--view", "1"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    assert parts[0].texts[2] in result.output.replace("\n", "")
    record = open_store(tmp_path / "a.h5")[2]
    size = f"{len(record.token_ids)} teacher tokens"
    assert f"sequence 2 of 12: document 1 from character 7, {size}" in result.output
    lines = [line for line in result.output.splitlines() if "piece" in line and "text" not in line]
    assert len(lines) == len(record.token_ids)
    for line, token, mask in zip(lines, record.token_ids, record.views[1].mask, strict=True):
        assert f" piece{token} " in line and (" x " in line) == mask
    path = tmp_path / "a.h5"
    last = run("show", path, -1)
    assert "sequence 11 of 12" in last.output and last.output == run("show", path, 11).output
    for number, words in ((99, "no sequence 99"), (-13, "no sequence -13; it has 0..11")):
        assert words in refused("show", tmp_path / "a.h5", number)
    assert "--vew: no such option" in refused("show", tmp_path / "a.h5", 0, "--vew", 1)
    assert "no view 5" in refused("show", tmp_path / "a.h5", 0, "--view", 5)


def test_a_task_is_shown_by_name(made: Made) -> None:
    texts, tokens = made("h5", "default", "classification"), made("zarr", "default", "tagging")
    for (path, parts), kind in ((texts, "classification"), (tokens, "tagging")):
        assert f"{kind}, 4 labels: dull, bright, надо, [x]" in run("info", path).output
        about = json.loads(run("info", path, "--json").output)
        assert about["features"]["task"] == {"kind": kind, "labels": list(LABELS)}
        assert ("view0/tags" in about["bytes_per_token_encoded"]) == (kind == "tagging")
        assert run("verify", path).exit_code == 0
        for number in range(6):
            said = run("show", path, number, "--view", 1).output
            part, record = parts[0], open_store(path)[number]
            if kind == "classification":
                name = LABELS[part.gold[number]] if part.gold[number] >= 0 else "none"
                best = LABELS[part.task[1][number].argmax()]
                assert f"label {name}, the teacher predicts {best} " in " ".join(said.split())
            else:
                assert record.tags is not None
                names = [LABELS[tag] for tag in record.tags if tag >= 0]
                assert all(name in said for name in names) and "│ tag" in said.replace("┃", "│")
