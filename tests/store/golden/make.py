"""Write the golden stores: `python -m tests.store.golden.make FOLDER` (see test_golden.py)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from store import FeatureStore, open_store
from tests.store.making import begin, features_of, make_part, put_part

STORES = {"default.zarr": "default", "default.h5": "default", "small.h5": "small"}


def values_of(fs: FeatureStore) -> dict[str, Any]:
    """Everything in a store, decoded, as JSON."""
    records = []
    for record in fs:
        views = []
        for view in record.views:
            logits = {k: getattr(view.logits, k) for k in ("ids", "logprobs", "rest")}
            views.append(
                {name: array.tolist() for name, array in logits.items()}
                | {
                    "log_partition": view.logits.log_partition.tolist(),
                    "hidden": view.hidden["mean"][:, :6].tolist(),
                    "attention": view.attention["mean"].sum(axis=0).tolist(),
                    "spans": view.spans.tolist(),
                    "mask": view.mask.tolist(),
                }
            )
        fields = {name: getattr(record, name) for name in ("text", "document", "document_begin")}
        arrays = {name: getattr(record, name).tolist() for name in ("token_ids", "offsets")}
        records.append(fields | arrays | {"special": record.special.tolist(), "views": views})
    return {"identity": fs.identity, "records": records}


def main(folder: Path) -> None:
    for name, codec in STORES.items():
        features = dataclasses.replace(features_of(codec), hidden=("mean",))
        writer = begin(folder / name, features)
        put_part(writer, 3, make_part(features, seed=1, sequences=3))
        writer.seal()
        expected = json.dumps(values_of(open_store(folder / name)), ensure_ascii=False)
        (folder / f"{name}.json").write_text(expected + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
