"""Unknown items in a store are refused if they may change its meaning, and ignored if they only add
to it (FORMAT.md, section 6)."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.tools.verify import verify
from tests.making.stores import copied, features_of, make_store
from tests.store.rewriting import seal_again, write_shard, zarr_array

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
