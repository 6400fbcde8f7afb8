"""The layout of a store: dimension names of Zarr arrays, and unknown items.

- Dimension names of Zarr arrays: xarray opens every group, and stores without names stay sound.
- Unknown items in a store are refused if they may change its meaning, and ignored if they only add
  to it (FORMAT.md, section 6).
"""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.containers.zarr.shards import array_node
from teachonce.store.format.layout import Counts, dimension_names, part_arrays
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from tests.making.stores import copied, features_of, make_store, unfinished
from tests.store.rewriting import seal_again, write_shard, zarr_array

KINDS = ("topk", "ranked-topk", "sample", "head", "classification", "tagging", None)
COUNTS = Counts(5, 41, 401, 97, (0, 11), (61, 67))


@pytest.mark.parametrize("codec", ("exact", "default", "small"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_has_one_length_in_a_group(codec: str, kind: str | None) -> None:
    lengths: dict[tuple[str, str], set[int]] = defaultdict(set)
    for path, spec in part_arrays(features_of(codec, kind), COUNTS).items():
        names = dimension_names(path, len(spec.shape))
        assert len(set(names)) == len(names) == len(spec.shape)
        assert not any(":" in name for name in names), path
        for name, length in zip(names, spec.shape, strict=True):
            lengths[path.rpartition("/")[0], name].add(length)
    assert all(len(found) == 1 for found in lengths.values()), lengths


@pytest.mark.parametrize("kind", ("topk", "sample", "head", "classification", "tagging"))
def test_xarray_opens_every_group(made: Callable[..., Any], kind: str) -> None:
    xarray = pytest.importorskip("xarray")
    path = made("zarr", "small" if kind == "head" else "default", kind)[0]
    fs, arrays = open_store(path), 0
    groups = {file.parent.relative_to(path) for file in path.rglob("zarr.json")}
    for group in sorted(groups):
        if json.loads((path / group / "zarr.json").read_text())["node_type"] == "array":
            continue
        data = xarray.open_dataset(path / group, engine="zarr", consolidated=False)
        for name, variable in data.variables.items():
            where = str(group / name)
            stored = fs.source.array(where)
            assert variable.shape == stored.shape
            assert np.array_equal(variable.values, stored.read(0, variable.shape[0])), where
            arrays += 1
    assert arrays > 80
    tokens = xarray.open_zarr(path / "parts/0/token", consolidated=False)
    assert tokens.id.dims == ("token",) and tokens.sizes["token"] == len(tokens.id)
    tree = xarray.open_datatree(path / "parts/0", engine="zarr", consolidated=False)
    hidden = tree["view1/hidden/mean"]
    assert hidden["values"].dims == ("token", "channel")


@pytest.fixture
def of_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Write like releases without dimension names, until the returned function is called."""

    def nameless(*given: Any) -> dict[str, Any]:
        return {k: v for k, v in array_node(*given).items() if k != "dimension_names"}

    monkeypatch.setattr("teachonce.store.containers.zarr.tree.array_node", nameless)
    return monkeypatch.undo


def named(path: Path) -> set[bool]:
    nodes = [json.loads(file.read_text()) for file in path.rglob("zarr.json")]
    return {bool(node.get("dimension_names")) for node in nodes if node["node_type"] == "array"}


def test_a_store_that_was_started_without_names(
    tmp_path: Path, of_before: Callable[[], None]
) -> None:
    path, features = tmp_path / "a.zarr", replace(features_of(), hidden=("mean",))
    unfinished(path, features)
    of_before()
    make_store(path, features, parts=2)
    assert named(path) == {False, True}
    assert verify(path).problems == []
    make_store(tmp_path / "b.zarr", features, parts=2)
    assert named(tmp_path / "b.zarr") == {True}
    one, other = open_store(path), open_store(tmp_path / "b.zarr")
    assert one.manifest.content() == other.manifest.content()


def test_an_old_store_that_is_repaired(tmp_path: Path, of_before: Callable[[], None]) -> None:
    path, features = tmp_path / "a.zarr", replace(features_of(), hidden=("mean",))
    make_store(path, features)
    assert named(path) == {False}
    content = open_store(path).manifest.content()
    of_before()
    assert verify(path).problems == []
    shard = path / "parts/1/token/id/c/0"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert repair(path)[0] == 2
    make_store(path, features)
    assert verify(path).problems == [] and named(path) == {False, True}
    assert open_store(path).manifest.content() == content


Edit = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("unknown") / "a.zarr"
    make_store(path, features_of("default", "tagging"), parts=1, sequences=3)
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of the store."""
    return copied(sound, tmp_path / "a.zarr")


def edited(path: Path, edit: Edit) -> None:
    """Apply `edit` to the root attributes and manifest, and update all values that must agree."""
    attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    manifest = json.loads(zarr_array(path / "manifest").tobytes())
    edit(attributes, manifest)
    attributes["arrays"] = manifest["arrays"]
    manifest["attributes"] |= {key: attributes[key] for key in ("features", "identity")}
    part = path / "parts/0/zarr.json"
    node = json.loads(part.read_text())
    node["attributes"]["part"] = manifest["parts"][0]
    part.write_text(json.dumps(node))
    seal_again(path, attributes, manifest, random.Random(0))


def add_array(path: Path, name: str) -> dict[str, Any]:
    """Write another array; return its entry."""
    values = np.arange(5, dtype=np.uint8)
    folder = path
    for segment in name.split("/")[:-1]:
        folder = folder / segment
        if not (folder / "zarr.json").exists():
            folder.mkdir()
            node = {"zarr_format": 3, "node_type": "group", "attributes": {}}
            (folder / "zarr.json").write_text(json.dumps(node))
    write_shard(path, name, values, (2,))
    return {"shape": [5], "dtype": "uint8", "sha256": hashlib.sha256(values.tobytes()).hexdigest()}


IGNORED: dict[str, Edit] = {
    "root attribute": lambda root, manifest: root.update(more=1),
    "key of features": lambda root, manifest: root["features"].update(more=[1]),
    "key of the manifest": lambda root, manifest: manifest.update(more={"a": 1}),
    "key of a part": lambda root, manifest: manifest["parts"][0].update(more=1),
    "key of counts": lambda root, manifest: manifest["parts"][0]["counts"].update(more=1),
    "key of an entry": lambda root, manifest: manifest["parts"][0]["arrays"]["token/id"].update(
        more=1
    ),
}


@pytest.mark.parametrize("what", IGNORED)
def test_what_is_ignored(sound: Path, path: Path, what: str) -> None:
    edited(path, IGNORED[what])
    assert verify(path).problems == []
    assert open_store(path)[2].text == open_store(sound)[2].text


@pytest.mark.parametrize("name", ("teacher/later/thing", "calibration/later/a/thing"))
def test_arrays_outside_the_parts_are_ignored_and_checked(
    sound: Path, path: Path, name: str
) -> None:
    entry = add_array(path, name)
    assert verify(path).problems == []
    assert verify(path).unknown == ["extra folder " + "/".join(name.split("/")[:2])]
    edited(path, lambda root, manifest: manifest["arrays"].update({name: entry}))
    assert verify(path).problems == []
    assert open_store(path)[2].text == open_store(sound)[2].text
    edited(path, lambda root, manifest: entry.update(sha256="0" * 64) or manifest["arrays"].update(
        {name: entry}
    ))  # fmt: skip
    assert verify(path).problems == [f"array {name} does not match its checksum"]


REFUSED: dict[str, Edit] = {
    "logits must have": lambda root, manifest: root["features"].update(
        logits={"tier": "topk", "size": 3, "more": 1}
    ),
    "task must have": lambda root, manifest: root["features"]["task"].update(more=1),
    "arrays do not match": lambda root, manifest: manifest["parts"][0]["arrays"].pop("token/tag"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(path: Path, message: str) -> None:
    edited(path, REFUSED[message])
    with pytest.raises(StoreError, match=message):
        open_store(path)
