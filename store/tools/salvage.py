"""A store whose manifest or root attributes are damaged, opened by what the rest of it says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.containers.interface import Source
from store.errors import StoreError
from store.format.manifest import CREATED, check_root, seal_checksum
from store.read.store import FeatureStore
from store.read.unfinished import readable_manifest
from store.tools.verify import Problem


def salvage(
    source: Source, path: Path, error: StoreError
) -> tuple[FeatureStore, dict[str, Any], list[Problem]]:
    """A sealed store that cannot be opened because of `error`, as an unfinished one: with the
    parts whose own entries can be read, its root attributes, and what is wrong. Raises the error
    if the rest does not say enough."""
    attributes = _attributes(source, path)
    if attributes is None:
        raise error
    features = check_root(attributes, source.path)
    manifest, unreadable = readable_manifest(source, attributes, features)
    found = [Problem(str(error))]
    found += [Problem(f"part {n}: cannot be opened: {why}", n) for n, why in unreadable.items()]
    return FeatureStore(source, attributes, features, manifest), attributes, found


def _attributes(source: Source, path: Path) -> dict[str, Any] | None:
    """Root attributes of an unfinished store. The manifest has them, too: where the checksum at the
    root fits it, it is sound; else the root is believed, unless that cannot be read."""
    try:
        root = source.attributes()
    except StoreError:
        root = {}
    try:
        array = source.array("manifest")
        data = array.read(0, array.shape[0]).tobytes()
        manifest: Any = json.loads(data)
    except (StoreError, ValueError, RecursionError):
        data, manifest = b"", None
    fits = root.get("checksum") == seal_checksum(data, str(root.get("created")))
    if isinstance(manifest, dict) and (fits or not root):
        known = manifest.get("attributes")
        known = (known if isinstance(known, dict) else {}) | {"arrays": manifest.get("arrays")}
        root |= {key: value for key, value in known.items() if root.get(key) != value}
    if "arrays" not in root:  # a store of before these were kept at the root
        return None
    if not CREATED.fullmatch(str(root.get("created"))):
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        root["created"] = written.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {key: root[key] for key in root if key != "checksum"} | {"state": "writing"}
