"""Replaces the numbers of classes by their names in the schema of a data set.

`datasets` stores a ClassLabel as an integer, and its names in the schema: in the metadata
`huggingface` of a Parquet file, and in `dataset_info.json`. The data set orders these names, so
their numbers are not the teacher's label ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from teachonce.teacher_dump.corpus.text_files import CorpusError

HUGGINGFACE = b"huggingface"


class ClassName(str):
    """Marks the name of a class in a schema, even if it looks like a number, as "1" does."""

    __slots__ = ()


Feature = Any
"""A feature in the JSON of `datasets`: {"_type": ...}, a list of one, or features by name."""


def features_in(metadata: Mapping[bytes, bytes] | None, where: object) -> dict[str, Feature]:
    """Return the features of `datasets` in the metadata of an Arrow schema, by column.

    Raises CorpusError if the metadata cannot be read: the meaning of numbers would be unknown.
    """
    raw = (metadata or {}).get(HUGGINGFACE)
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        features = None
    if not isinstance(features, dict):
        raise CorpusError(
            f"{where}: its schema describes features in another form than `datasets` (metadata"
            " 'huggingface'); write the file again"
        )
    return features


def with_class_names(cell: Any, feature: Feature, where: object) -> Any:
    """Return a cell with the names of classes in place of their numbers; None for -1, "no label".

    Raises CorpusError for a number without a name, and for a feature that does not fit the cell.
    """
    try:
        return _with_names(cell, feature, where)
    # The schema is JSON of unknown origin: its forms are too many to check each one before use.
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError):
        raise CorpusError(
            f"{where}: its cells do not have the type that its schema declares, {feature!r:.60};"
            " write the file again"
        ) from None


def _with_names(cell: Any, feature: Feature, where: object) -> Any:
    if cell is None or not feature:
        return cell
    if isinstance(feature, list):
        return [_with_names(element, feature[0], where) for element in cell]
    kind, inner = feature.get("_type"), feature.get("feature")
    if kind == "ClassLabel":
        return _name(cell, feature.get("names"), where)
    if isinstance(cell, list) and isinstance(kind, str):
        return [_with_names(element, inner, where) for element in cell]
    if isinstance(cell, dict):
        if isinstance(kind, str):  # a sequence of dicts is stored as a dict of sequences
            inner = {key: [subfeature] for key, subfeature in (inner or {}).items()}
        else:
            inner = feature
        return {key: _with_names(value, inner.get(key), where) for key, value in cell.items()}
    return cell


def _name(cell: Any, names: Any, where: object) -> Any:
    if isinstance(cell, str) or names is None:
        return cell
    # If a value is missing, pandas writes NaN for it, and the column's integers as floats.
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if cell == -1 or cell != cell:
        return None
    if isinstance(cell, int) and isinstance(names, list) and 0 <= cell < len(names):
        # Names that only count (0, 1, 2) carry no more information than the numbers.
        counted = all(str(name) == str(number) for number, name in enumerate(names))
        return (str if counted else ClassName)(names[cell])
    number = len(names) if isinstance(names, list) else "no"
    raise CorpusError(
        f"{where}: {cell!r:.40} is not a label of its schema, which has {number} names; write"
        " the file again, with all names or without a ClassLabel"
    )
