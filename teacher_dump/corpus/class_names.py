"""Puts the names of classes in place of their numbers, as the schema of a data set gives them.

`datasets` writes a ClassLabel as a whole number, and its names into the schema: into the meta-data
`huggingface` of a Parquet file, and into `dataset_info.json`. The order of these names is the data
set's own, and no teacher's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from teachonce.teacher_dump.corpus.errors import CorpusError

HUGGINGFACE = b"huggingface"


class ClassName(str):
    """The name of a class in a schema: a name even if it is written as a number, as "1" is."""

    __slots__ = ()


Feature = Any
"""A feature in the JSON of `datasets`: {"_type": ...}, a list of one, or features by name."""


def features_in(metadata: Mapping[bytes, bytes] | None, where: object) -> dict[str, Feature]:
    """Return the features by column that the meta-data of an Arrow schema describes, often none.

    Raises CorpusError if the meta-data cannot be read: numbers would then have no meaning.
    """
    raw = (metadata or {}).get(HUGGINGFACE)
    if raw is None:
        return {}
    try:
        found = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorpusError(
            f"{where}: its schema describes the features of a data set, but not as `datasets` does"
            " (meta-data 'huggingface'); write the file again"
        )
    return found


def named(cell: Any, feature: Feature, where: object) -> Any:
    """Return a cell with the name of every class in place of its number; None for "no label", -1.

    Raises CorpusError for a number without a name, and for a feature that does not fit the cell.
    """
    try:
        return _named(cell, feature, where)
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError):
        raise CorpusError(
            f"{where}: the schema describes its cells as {feature!r:.60}, which they are not; write"
            " the file again"
        ) from None


def _named(cell: Any, feature: Feature, where: object) -> Any:
    if cell is None or not feature:
        return cell
    if isinstance(feature, list):
        return [_named(each, feature[0], where) for each in cell]
    kind, inner = feature.get("_type"), feature.get("feature")
    if kind == "ClassLabel":
        return _name(cell, feature.get("names"), where)
    if isinstance(cell, list) and isinstance(kind, str):
        return [_named(each, inner, where) for each in cell]
    if isinstance(cell, dict):
        if isinstance(kind, str):  # a sequence of named features is stored as named sequences
            inner = {key: [each] for key, each in (inner or {}).items()}
        else:
            inner = feature
        return {key: _named(each, inner.get(key), where) for key, each in cell.items()}
    return cell


def _name(cell: Any, names: Any, where: object) -> Any:
    if isinstance(cell, str) or names is None:
        return cell
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if cell == -1 or cell != cell:
        return None
    if isinstance(cell, int) and isinstance(names, list) and 0 <= cell < len(names):
        # names that only count, 0, 1, 2, say no more than the numbers do
        counted = all(str(name) == str(number) for number, name in enumerate(names))
        return (str if counted else ClassName)(names[cell])
    number = len(names) if isinstance(names, list) else "no"
    raise CorpusError(
        f"{where}: {cell!r:.40} is no label of its schema, which has {number} names; write the file"
        " again, with all names or without a ClassLabel"
    )
