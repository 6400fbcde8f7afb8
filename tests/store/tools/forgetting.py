"""Search for a text in any file and any decoded array, and run `forget`."""

from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401
import numpy as np
import zarr

from teachonce.store import FeatureStore
from teachonce.store.tools.forget import DocumentsToForget, forget


def wants(*numbers: int) -> DocumentsToForget:
    return DocumentsToForget({number: f"number {number}" for number in numbers})


def run(path: Path, *numbers: int, request: str = "") -> None:
    """Forget documents by number."""
    name = request or ",".join(map(str, numbers))
    forget(path, name, lambda store: wants(*numbers))


def holding(folder: Path, text: str) -> list[str]:
    """Return the files and arrays under a folder, hidden files included, that contain a text."""
    data, found = text.encode(), []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if data in path.read_bytes():
            found.append(f"{path} (raw)")
        if path.name == "zarr.json" and '"data_type": "uint8"' in path.read_text():
            array = zarr.open_array(path.parent, mode="r")
            if data in np.asarray(array[:]).tobytes():
                found.append(f"{path.parent} (decoded)")
        elif path.suffix == ".h5":
            found += _in_hdf5(path, data)
    return found


def _in_hdf5(path: Path, data: bytes) -> list[str]:
    found: list[str] = []

    def look(name: str, node: object) -> None:
        if not isinstance(node, h5py.Dataset) or node.dtype != np.uint8:
            return
        if data in np.asarray(node[()]).tobytes():
            found.append(f"{path}: {name}")

    with h5py.File(path, "r") as file:
        file.visititems(look)
    return found


def facts(store: FeatureStore, index: int) -> dict[str, object]:
    """Return all values stored for a sequence, decoded, for comparison."""
    record = store[index]
    found: dict[str, object] = {
        "document": record.document, "begin": record.document_begin, "cut": record.hard_cut,
        "text": record.text, "label": record.label,
    }  # fmt: skip
    arrays = {"ids": record.token_ids, "offsets": record.offsets, "special": record.special}
    if record.tags is not None:
        arrays["tags"] = record.tags
    if store.features.embedding:
        arrays["vector"] = record.embedding
    for view in record.views:
        here = f"view{view.number}"
        arrays |= {f"{here} {name}": view.hidden[name] for name in store.features.hidden}
        arrays |= {f"{here} {name} map": view.attention[name] for name in store.features.attention}
        arrays[f"{here} spans"] = view.spans
        if store.features.logits:
            logits = view.logits
            names = ("log_partition", "ids", "logprobs", "rest", "start", "counts", "values")
            columns = {name: getattr(logits, name) for name in names}
            arrays |= {f"{here} {k}": v for k, v in columns.items() if v is not None}
        if store.features.task:
            kind = store.features.task.kind
            arrays[f"{here} task"] = (
                view.class_logits if kind == "classification" else view.tag_logits
            )
    return found | {name: (values.shape, values.tobytes()) for name, values in arrays.items()}
