"""Stores of one teacher over several corpora are merged."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import open_store
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from tests.making.stores import IDENTITY, SMALL, Made, features_of, make_store
from tests.store.tools.test_commands import refused, run


def stores_to_merge(folder: Path, codec: str, change: bool) -> tuple[Path, Path]:
    features = dataclasses.replace(features_of(codec), attention=())
    paths = folder / "1.h5", folder / "2.zarr"
    for number, path in enumerate(paths):
        identity = IDENTITY | {"corpus": {"hash": str(number)}}
        calibration = {
            name: (np.full(37, number * change, "f"), np.ones(37, "f")) for name in features.hidden
        }
        parts = 2 + number
        make_store(path, features, parts, identity=identity, calibration=calibration)
    return paths


def test_merge(tmp_path: Path) -> None:
    paths = stores_to_merge(tmp_path, "default", change=False)
    target = tmp_path / "all.zarr"
    assert run("merge", *paths, target).exit_code == 0
    fs, both = open_store(target), [open_store(path) for path in paths]
    assert fs.identity["corpus"] == {"merged": [{"hash": "0"}, {"hash": "1"}]}
    assert len(fs) == 60 and list(fs.texts()) == list(both[0].texts()) + list(both[1].texts())
    documents = [record.document for record in fs]
    assert len(set(documents)) == 12
    assert min(documents[24:]) == max(documents[:24]) + 1
    read, put = fs[30].views[1].hidden["mean"], both[1][6].views[1].hidden["mean"]
    assert (read == put).all()
    assert run("verify", target).exit_code == 0


@pytest.mark.parametrize("order", [("ranked-topk", "topk"), ("topk", "ranked-topk")])
def test_merge_of_ranked_and_plain_ids(tmp_path: Path, order: tuple[str, str]) -> None:
    paths = [tmp_path / f"{tier}.zarr" for tier in order]
    for number, (tier, path) in enumerate(zip(order, paths, strict=True)):
        make_store(path, features_of(tier=tier), parts=1 + number)
    merge(paths, tmp_path / "both.h5")
    both, sources = open_store(tmp_path / "both.h5"), [open_store(path) for path in paths]
    assert both.features == sources[0].features
    assert verify(tmp_path / "both.h5").problems == []
    records = [record for source in sources for record in source]
    for found, expected in zip(both, records, strict=True):
        for one, other in zip(found.views, expected.views, strict=True):
            assert (one.logits.ids == other.logits.ids).all()
            assert (one.logits.logprobs == other.logits.logprobs).all()


def test_merge_refuses_what_does_not_fit(tmp_path: Path, made: Made) -> None:
    one, two = stores_to_merge(tmp_path, "default", change=False)
    target = tmp_path / "all.h5"
    line = refused("merge", one, made("h5")[0], target)
    assert "hold different features: attention is none and mean; dump" in line
    line = refused("merge", one, target)
    assert "at least two stores" in line and "`feature-store convert`" in line
    assert run("convert", one, tmp_path / "copy.zarr").exit_code == 0
    for again in (one, tmp_path / "." / ".." / tmp_path.name / one.name, tmp_path / "copy.zarr"):
        line = refused("merge", one, two, again, target)
        assert f"{again}: has the same content as {one} (SHA-256 " in line and "held-out" in line
    assert not target.exists()


def test_merge_names_a_source_that_two_stores_have(tmp_path: Path) -> None:
    # The hash of a folder of datasets is the same for all its splits.
    sources = ("folder", "train"), ("folder", "test"), ("renamed", "train"), ("again", "train")
    paths = [tmp_path / f"{number}.zarr" for number in range(4)]
    for parts, (path, (name, split)) in enumerate(zip(paths, sources, strict=True), 1):
        corpus = {"sources": [{"kind": "hf", "name": name, "split": split, "sha256": "1"}]}
        make_store(path, features_of(), parts, identity=IDENTITY | {"corpus": corpus})
    one, two, three, four = paths
    assert not run("merge", one, two, tmp_path / "both.zarr").stderr
    result = run("merge", tmp_path / "both.zarr", three, tmp_path / "all.zarr")
    assert result.exit_code == 0
    line = f"{tmp_path / 'both.zarr'} and {three} were both dumped from renamed: texts that both"
    assert line in result.stderr
    result = run("merge", four, tmp_path / "all.zarr", tmp_path / "more.zarr")
    assert result.stderr.count("dumped from") == 1  # though all.zarr has the source twice


def test_merge_of_tasks(tmp_path: Path) -> None:
    """Gold labels and outputs stay with their texts; different label names are refused."""
    features = dataclasses.replace(features_of(tier="classification"), hidden=())
    paths = [tmp_path / "1.h5", tmp_path / "2.zarr"]
    for number, path in enumerate(paths):
        make_store(path, features, parts=2 + number)
    assert run("merge", *paths, tmp_path / "all.zarr").exit_code == 0
    fs, second = open_store(tmp_path / "all.zarr"), open_store(paths[1])
    assert [record.label for record in fs][24:] == [record.label for record in second]
    assert (fs[30].views[1].class_logits == second[6].views[1].class_logits).all()
    assert run("verify", tmp_path / "all.zarr").exit_code == 0
    assert features.task is not None
    other = dataclasses.replace(features.task, labels=("dull", "bright", "надо", "other"))
    make_store(tmp_path / "3.h5", dataclasses.replace(features, task=other), parts=1)
    line = refused("merge", paths[0], tmp_path / "3.h5", tmp_path / "b.h5")
    assert "hold different features: task.labels.3 is '[x]' and 'other'; dump" in line


def test_merge_of_other_calibrations_gives_the_command(tmp_path: Path) -> None:
    one, two = stores_to_merge(tmp_path, "default", change=True)
    target = tmp_path / "all of them.h5"
    line = refused("merge", one, two, target)
    assert "the mean and standard deviation of their own dump" in line
    command = line.partition("once more, run: ")[2]
    assert command == f"feature-store merge --recode {one} {two} '{target}'"
    assert not target.exists()
    assert run(*shlex.split(command)[1:]).exit_code == 0
    fs, second = open_store(target), open_store(two)
    read, put = fs[30].views[0].hidden["mean"], second[6].views[0].hidden["mean"]
    assert np.abs(read - put).max() <= 1.001 * (np.abs(read).max() + 1) / 127
    assert np.abs(read - put).max() > 0


TEACHER = {"id": "tiny", "revision": "1", "weights_hash": "ab" * 32, "config_hash": "1"}
ARGUMENTS = {"seed": 0, "mask_prob": 0.15, "precision": "fp32", "limit": 5, "device": "cpu"}


def store_of(path: Path, changes: dict[str, Any], **config: Any) -> Path:
    """Make a store of one part; `changes` apply to the teacher's identity and the arguments, or
    replace the teacher's identity."""
    teacher = {key: changes.get(key, value) for key, value in TEACHER.items()}
    identity = {
        "teacher": changes.get("teacher", teacher),
        "corpus": {"sources": [{"name": path.name}]},
        "arguments": {key: changes.get(key, value) for key, value in ARGUMENTS.items()},
    }
    files = {"config.json": json.dumps({"_name_or_path": path.name, "eps": 1e-5} | config).encode()}
    features = dataclasses.replace(features_of(views=changes.get("views", 2)), attention=())
    make_store(path, features, parts=1, identity=identity, files=files)
    return path


def test_a_stopped_merge_does_not_go_on_with_other_stores(tmp_path: Path) -> None:
    corpus = {"identity": IDENTITY | {"corpus": {"hash": "c"}}}
    features = dataclasses.replace(features_of(), attention=())
    for name, sequences, parts in (("1", 12, 2), ("2", 8, 2), ("short", 8, 1)):
        make_store(tmp_path / f"{name}.h5", features, parts, sequences, **corpus)
    target, words = tmp_path / "all.h5", [tmp_path / f"{name}.h5" for name in ("1", "2")]

    def stop(items: Sequence[Any]) -> Any:
        yield from items
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(words, target, progress=stop)
    for others, message in (
        (("2", "1"), "sequence/document of part 0 differs"),
        (("1", "short"), "part 3 differs"),
    ):
        line = refused("merge", *(tmp_path / f"{name}.h5" for name in others), target)
        assert message in line and "started from another store" in line
    assert run("merge", *words, target).exit_code == 0
    assert len(open_store(target)) == 40 and run("verify", target).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        (
            {"weights_hash": "ab" * 31 + "cd"},
            {},
            "teacher.weights_hash is '…ababababababab' and '…ababababababcd'",
        ),  # where they differ
        ({"precision": "bf16"}, {}, "arguments.precision is fp32 and bf16"),
        ({"mask_prob": 0.4}, {}, "arguments.mask_prob is 0.15 and 0.4"),
        ({}, {"eps": 0.1}, "config.eps is 1e-05 and 0.1"),
    ],
)
def test_merge_names_what_differs(
    tmp_path: Path, changes: dict[str, Any], config: dict[str, float], message: str
) -> None:
    one, two = store_of(tmp_path / "1.h5", {}), store_of(tmp_path / "2.h5", changes, **config)
    line = refused("merge", one, two, tmp_path / "all.h5")
    assert f"1.h5 and {two} cannot be merged: {message}; dump one of them again" in line
    assert "limit" not in line and "corpus" not in line


def test_captures_of_teachers_with_other_names_are_not_merged(tmp_path: Path) -> None:
    """Imported captures have no hash of the weights, so different teacher names are not merged."""
    one, two, again = (
        store_of(
            tmp_path / f"{number}.h5",
            {"views": 1, "teacher": {"id": name, "captured_by": "distillkit"}},
        )
        for number, name in enumerate(("tiny", "large", "tiny"))
    )
    line = refused("merge", one, two, tmp_path / "all.h5")
    assert f"0.h5 and {two} cannot be merged: teacher.id is tiny and large; dump" in line
    assert run("merge", one, again, tmp_path / "all.h5").exit_code == 0


def test_how_a_dump_was_run_does_not_matter(tmp_path: Path) -> None:
    changes = {"id": "/elsewhere", "config_hash": "2", "seed": 7, "limit": None, "device": "cuda"}
    one, two = store_of(tmp_path / "1.h5", {}), store_of(tmp_path / "2.h5", changes)
    result = run("merge", one, two, tmp_path / "all.h5")
    assert result.exit_code == 0 and "24 sequences" in result.output
    merged = open_store(tmp_path / "all.h5").identity
    # the values on which both agree
    assert merged["arguments"] == {"mask_prob": 0.15, "precision": "fp32"}
    assert [corpus["sources"][0]["name"] for corpus in merged["corpus"]["merged"]] == [
        "1.h5",
        "2.h5",
    ]


def test_without_masked_views_their_share_does_not_matter(tmp_path: Path) -> None:
    one = store_of(tmp_path / "1.h5", {"views": 1})
    two = store_of(tmp_path / "2.h5", {"views": 1, "mask_prob": 0.4})
    assert run("merge", one, two, tmp_path / "all.h5").exit_code == 0


def test_merge_of_exact_stores_keeps_every_value(tmp_path: Path) -> None:
    one, two = stores_to_merge(tmp_path, "exact", change=True)
    assert run("merge", one, two, tmp_path / "all.h5").exit_code == 0
    fs, second = open_store(tmp_path / "all.h5"), open_store(two)
    read, put = fs[30].views[0].hidden["mean"], second[6].views[0].hidden["mean"]
    assert (read == put).all()


def test_identities_of_any_form(tmp_path: Path) -> None:
    """Keys of an identity are free (FORMAT.md, section 4)."""
    identity = {"teacher": 5, "corpus": [1], "arguments": "x"}
    for name in ("a", "b"):
        make_store(tmp_path / f"{name}.zarr", SMALL, parts=1, identity=identity)
    merge([tmp_path / "a.zarr", tmp_path / "b.zarr"], tmp_path / "c.zarr")
    assert open_store(tmp_path / "c.zarr").identity["corpus"] == {"merged": [[1], [1]]}
