"""Write the golden stores: `python -m tests.store.golden.make FOLDER` (see test_foreign.py)."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from teachonce.store import FeatureStore, open_store
from tests.making.stores import begin, features_of, make_part, put_part

STORES = {
    "default.zarr": ("default", "topk"),
    "default.h5": ("default", "topk"),
    "small.h5": ("small", "topk"),
    "tags.h5": ("small", "tagging"),  # later, since stores can hold a task
    "groups64.h5": ("small", "topk"),  # `small` since its groups have 64 channels
    "named.zarr": ("default", "topk"),  # Zarr since dimensions have names
    "pairs.h5": ("small", "pairs"),  # later, since texts can be pairs
    "vectors.h5": ("small", "embedding"),  # later, since texts can have vectors
    "chat.h5": ("small", "chat"),  # later, since tokens can be excluded from training
    "causal.h5": ("default", "next-topk"),  # later, with the log-probability of each token
    "ranked.h5": ("default", "ranked-topk"),  # later, with ids as positions in a list
    "messages.h5": ("small", "chat"),  # later, with the messages of chats
}


def values_of(fs: FeatureStore) -> dict[str, Any]:
    """Return everything in a store, decoded, as JSON."""
    records = []
    for record in fs:
        views = []
        for view in record.views:
            names: tuple[str, ...] = ("ids", "logprobs", "rest", "log_partition")
            kinds = {"tagging": ("tag_logits",), "classification": ("class_logits",)}
            if fs.features.task:
                names = kinds[fs.features.task.kind]
            elif fs.features.embedding:
                names = ()
            if fs.features.logits and fs.features.logits.observed:
                names = (*names, "observed")
            held = view.logits if fs.features.logits else view
            logits = {name: getattr(held, name) for name in names}
            views.append(
                {name: array.tolist() for name, array in logits.items()}
                | {
                    "hidden": view.hidden["mean"][:, :6].tolist(),
                    "attention": view.attention["mean"].sum(axis=0).tolist(),
                    "spans": view.spans.tolist(),
                    "mask": view.mask.tolist(),
                }
            )
        fields = {name: getattr(record, name) for name in ("text", "document", "document_begin")}
        arrays = {name: getattr(record, name).tolist() for name in ("token_ids", "offsets")}
        if fs.features.separator is not None:
            fields |= {"texts": list(record.texts), "label": record.label}
        if fs.features.embedding:
            arrays["embedding"] = record.embedding.tolist()
        if fs.features.context and record.learn is not None:
            fields["context"], arrays["learn"] = record.context, record.learn.tolist()
        if record.messages is not None:
            arrays["messages"] = record.messages.tolist()
        if record.tags is not None:
            arrays["tags"] = record.tags.tolist()
        records.append(fields | arrays | {"special": record.special.tolist(), "views": views})
    return {"identity": fs.identity, "records": records}


def main(folder: Path) -> None:
    for name, (codec, tier) in STORES.items():
        features = dataclasses.replace(features_of(codec, tier), hidden=("mean",))
        if name == "chat.h5":
            features = dataclasses.replace(features, messages=False)
        writer = begin(folder / name, features)
        put_part(writer, 3, make_part(features, seed=1, sequences=3))
        writer.seal()
        expected = json.dumps(values_of(open_store(folder / name)), ensure_ascii=False)
        (folder / f"{name}.json").write_text(expected + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
