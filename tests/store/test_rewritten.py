"""Any store that conforms to FORMAT.md is sound: chunks, shards and compressors may come from any
writer, other software and other releases of zarr included."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from teachonce.store import Features, open_store
from teachonce.store.tools.verify import verify
from tests.integrity.damage import problems
from tests.making.stores import features_of, make_store
from tests.store.rewriting import rewrite_h5, rewrite_zarr

GOLDEN = Path(__file__).parent / "golden"
OTHER = os.environ.get("TEACHONCE_OTHER_ZARR")  # a Python with another release of zarr
REWRITE = {"zarr": rewrite_zarr, "h5": rewrite_h5}
SEEDS = int(os.environ.get("TEACHONCE_SEEDS", "1"))
Copy = Callable[..., Path]


def small(codec: str = "default", tier: str = "topk") -> Features:
    return dataclasses.replace(features_of(codec, tier), hidden=("mean",))


def assert_sound(path: Path, before: Path) -> None:
    assert verify(path).problems == []
    fs, expected = open_store(path), open_store(before)
    assert fs.manifest.content() == expected.manifest.content()
    for found, batch in zip(fs.stream(seed=3), expected.stream(seed=3), strict=True):
        assert np.array_equal(found.index, batch.index)
        assert np.array_equal(found.token_ids, batch.token_ids)
        for name in batch.hidden:
            assert np.array_equal(found.hidden[name].values, batch.hidden[name].values)
    for index in (0, len(fs) - 1):
        view = fs[index].views[1]
        assert fs[index].text == expected[index].text
        other = expected[index].views[1]
        assert np.array_equal(view.logits.log_partition, other.logits.log_partition)
        assert np.array_equal(view.attention["mean"], other.attention["mean"])


@pytest.mark.slow
@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize(
    "codec, tier", (("exact", "sample"), ("default", "topk"), ("small", "head"))
)
def test_other_chunks_and_compressors_are_no_damage(
    tmp_path: Path, ext: str, codec: str, tier: str
) -> None:
    before = tmp_path / f"before.{ext}"
    make_store(before, small(codec, tier), parts=2, sequences=6)
    for seed in range(SEEDS):
        path = tmp_path / f"{seed}.{ext}"
        (shutil.copytree if before.is_dir() else shutil.copy)(before, path)
        REWRITE[ext](path, seed)
        assert_sound(path, before)


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small Zarr store without a checksum of any zarr.json."""
    path: Path = tmp_path_factory.mktemp("rewritten") / "a.zarr"
    make_store(path, small(), parts=1)
    rewrite_zarr(path)
    assert problems(path) == []
    return path


UNLAWFUL: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "attributes": lambda node, sharding: node["attributes"].update(a=1),
    "fill value": lambda node, sharding: node.update(fill_value=1),
    "keys": lambda node, sharding: node.update(more=1),
    "dimension names": lambda node, sharding: node.update(dimension_names=["x"]),
    "chunk keys": lambda node, sharding: node["chunk_key_encoding"].update(more=1),
    "other codecs": lambda node, sharding: sharding["codecs"].pop(),
    "more than one shard": lambda node, sharding: (
        sharding.update(chunk_shape=[2]),
        node["chunk_grid"]["configuration"].update(chunk_shape=[2]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNLAWFUL)
@pytest.mark.parametrize("name", ("manifest", "parts/0/text/utf8"))
def test_what_the_format_does_not_allow_is_found(rewritten: Path, what: str, name: str) -> None:
    file = rewritten / name / "zarr.json"
    before = file.read_text()
    node = json.loads(before)
    UNLAWFUL[what](node, node["codecs"][0]["configuration"])
    file.write_text(json.dumps(node))
    found = problems(rewritten)
    file.write_text(before)
    assert len(found) == 1 and name.removeprefix("parts/0/") in found[0]
    if "cannot be" in found[0]:  # decoded or opened: nobody can read it
        assert what in ("other codecs", "more than one shard")
    elif name == "manifest":
        assert found == ["altered file manifest/zarr.json"]
    else:
        assert found[0].startswith("part 0: array text/utf8 is stored with") and what in found[0]


def test_chunks_without_a_checksum_are_found_in_hdf5(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        values = file["parts/1/token/id"][:]
        del file["parts/1/token/id"]
        file["parts/1/token"].create_dataset("id", data=values, chunks=(64,))
    assert "part 1: array token/id is stored with chunks without Fletcher-32" in "\n".join(
        verify(path).problems
    )


def run(python: str, *arguments: str) -> str:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=root,
        env=os.environ | {"PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(OTHER is None, reason="TEACHONCE_OTHER_ZARR names no Python")
def test_another_release_of_zarr(tmp_path: Path) -> None:
    """A store that one release of zarr writes is sound for the other, with or without `store`."""
    import zarr

    assert OTHER
    theirs = run(OTHER, "-c", "import zarr; print(zarr.__version__)").strip()
    assert theirs != zarr.__version__
    make = "from pathlib import Path; from tests.making.stores import *; make_store(Path('{}'),"
    check = "from teachonce.store.tools.verify import verify; print(verify('{}').problems)"
    ours, other = tmp_path / "ours.zarr", tmp_path / "other.zarr"
    make_store(ours, features_of(), parts=1)
    run(OTHER, "-c", make.format(other) + " features_of(), parts=1)")
    assert_sound(other, ours)
    assert run(OTHER, "-c", check.format(ours)).strip() == "[]"
    for path, python, reader in ((ours, OTHER, sys.executable), (other, sys.executable, OTHER)):
        run(python, "-m", "tests.store.rewriting", str(path), "5")
        assert run(reader, "-c", check.format(path)).strip() == "[]"
