"""Make the zarr.json of groups and arrays, and check an array's against FORMAT.md. Chunk shapes and
Blosc settings may have any value."""

from __future__ import annotations

import json
import re
from typing import Any

from teachonce.store.format.layout import ArraySpec, dimension_names

KEYS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding",
    "fill_value", "codecs", "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip
SHARDING = {"chunk_shape", "codecs", "index_codecs", "index_location"}
BLOSC = {"cname", "clevel", "shuffle", "typesize", "blocksize"}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
GROUP = {"attributes": {}, "zarr_format": 3, "node_type": "group"}


def group_json(attributes: dict[str, Any]) -> bytes:
    """Return the zarr.json of a group."""
    # One text everywhere: equal stores have equal bytes, in a bucket and after a repair, too.
    return json.dumps(GROUP | {"attributes": attributes}, indent=1).encode()


def array_node(path: str, spec: ArraySpec, rows: int) -> dict[str, Any]:
    """Return the zarr.json of the array at `path`: one shard with chunks of `rows` rows."""
    # Zarr requires that a shard has whole chunks, FORMAT.md that no side of it is 0.
    shard_rows = -(-max(1, spec.shape[0]) // rows) * rows
    row = [max(1, size) for size in spec.shape[1:]]
    packing = []
    if spec.packing is not None:
        settings = {"typesize": spec.dtype.itemsize, **spec.packing._asdict(), "blocksize": 0}
        packing = [{"name": "blosc", "configuration": settings}]
    sharding = {
        "chunk_shape": [rows, *row],
        # zarr-python leaves out the byte order of single bytes.
        "codecs": [LITTLE if spec.dtype.itemsize > 1 else {"name": "bytes"}, *packing, CRC],
        "index_codecs": [LITTLE, CRC],
        "index_location": "end",
    }
    # Keys have zarr-python's order and include its optional ones, so that the bytes are the same.
    return {
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows, *row]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": spec.dtype.type(0).item(),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "dimension_names": list(dimension_names(path, len(spec.shape))),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _name_and_configuration(extension: Any) -> tuple[Any, Any]:
    """Return name and configuration of a codec or chunk grid, which Zarr may write as its name
    alone."""
    if isinstance(extension, dict) and extension.keys() <= {"name", "configuration"}:
        return extension.get("name"), extension.get("configuration", {})
    return extension, {}


def _chain(codecs: Any) -> list[tuple[Any, Any]]:
    return [_name_and_configuration(codec) for codec in codecs] if isinstance(codecs, list) else []


def format_violation(node: dict[str, Any], path: str) -> str | None:
    """Describe what FORMAT.md forbids in the zarr.json of the array at `path`; None if it is
    valid."""
    rules = {
        "keys that are not of Zarr 3": node.keys() <= KEYS and node.get("node_type") == "array",
        "attributes": node.get("attributes", {}) == {},
        "storage transformers": node.get("storage_transformers", []) == [],
        "a fill value that is not 0": node.get("fill_value") == 0,
        "other dimension names": _names_agree(node, path),
        "more than one shard": _one_shard(node),
        "other chunk keys": _name_and_configuration(node.get("chunk_key_encoding"))
        in (("default", {"separator": "/"}), ("default", {})),
        "other codecs": _codecs_agree(node),
    }
    return next((rule for rule, holds in rules.items() if not holds), None)


def _names_agree(node: dict[str, Any], path: str) -> bool:
    shape, names = node.get("shape"), node.get("dimension_names")
    if names is None:  # older stores have no dimension names
        return True
    if not isinstance(shape, list) or not isinstance(names, list) or len(names) != len(shape):
        return False
    relative = re.sub(r"^parts/\d+/", "", path)
    return tuple(names) == dimension_names(relative, len(shape))


def _one_shard(node: dict[str, Any]) -> bool:
    grid, configuration = _name_and_configuration(node.get("chunk_grid"))
    try:
        pairs = zip(configuration["chunk_shape"], node["shape"], strict=True)
        return grid == "regular" and all(chunk >= max(1, size) for chunk, size in pairs)
    except (KeyError, TypeError, ValueError):
        return False


def _codecs_agree(node: dict[str, Any]) -> bool:
    match _chain(node.get("codecs")):
        case [("sharding_indexed", dict() as sharding)] if sharding.keys() <= SHARDING:
            pass
        case _:
            return False
    if _chain(sharding.get("index_codecs")) != _chain([LITTLE, CRC]):
        return False
    match _chain(sharding.get("codecs")):
        case [first, last]:
            pass
        case [first, ("blosc", dict() as settings), last] if settings.keys() <= BLOSC:
            pass
        case _:
            return False
    small = node.get("data_type") in ("bool", "int8", "uint8")
    plain = [first] == _chain([LITTLE]) or (small and first == ("bytes", {}))
    return plain and [last] == _chain([CRC])
