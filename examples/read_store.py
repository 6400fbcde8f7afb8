"""Read a feature store with NumPy, and zarr (3.1 or later) or h5py with hdf5plugin; nothing else.

Written from store/FORMAT.md, whose sections the comments name. Copy it into your own software.

    python examples/read_store.py STORE        prints the first sequences of a .zarr or .h5 store
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]
OBJECTS = ("identity", "features", "software", "arrays")


def open_tree(path: str) -> tuple[Any, Json]:
    """The groups and arrays of a store, and its root attributes (sections 3 and 4)."""
    if Path(path).suffix == ".h5":
        import h5py
        import hdf5plugin  # noqa: F401  registers filter 32001, Blosc

        root = h5py.File(path, "r")
        texts = {k: v.decode() for k, v in root.attrs.items() if isinstance(v, bytes)}
        rest = {k: int(v) for k, v in root.attrs.items() if k not in texts}
        return root, rest | {k: json.loads(v) if k in OBJECTS else v for k, v in texts.items()}
    import zarr

    group = zarr.open_group(path, mode="r", zarr_format=3)
    return group, dict(group.attrs)


def decode_logs(codes: Array, encoding: Json) -> Array:
    """Log-probabilities, float32 (section 7)."""
    values = codes.astype(np.float32)
    if encoding["encoding"] == "fixed":
        return np.where(codes == 65535, -np.inf, -values / 1024)
    if encoding["encoding"] == "root":
        return np.where(codes == 255, -np.inf, -((values / 32) ** 2))
    return values  # float32


def decode_scaled(values: Array, scale: Any, encoding: Json) -> Array:
    """Hidden states or inputs of the head, float32 [T, width], still normalised (section 7)."""
    if encoding["encoding"] == "int8":
        return np.asarray(values * scale.astype(np.float32)[:, None])
    if encoding["encoding"] == "int4":  # two's complement; the even channel is the low half
        halves = np.stack([values & 15, values >> 4], axis=2).reshape(len(values), -1)
        codes = (halves.astype(np.float32) + 8) % 16 - 8
        scale = np.repeat(scale, encoding["group"], axis=1)
        return np.asarray(codes * scale[:, : codes.shape[1]])
    return values.astype(np.float32)  # float32, float16


class Store:
    """An open store: iterate over it for its sequences, each a dictionary."""

    def __init__(self, path: str) -> None:
        self.root, attributes = open_tree(path)
        if attributes["format"] != "teachonce" or attributes["version"] not in (1, 2):
            raise ValueError(f"{path}: not a feature store of version 1 or 2")
        if attributes["state"] != "sealed":
            raise ValueError(f"{path}: not finished")
        manifest = self.root["manifest"][:].tobytes()
        seal = hashlib.sha256(manifest + attributes["created"].encode()).hexdigest()
        if seal != attributes["checksum"]:
            raise ValueError(f"{path}: the manifest does not match its checksum")
        self.manifest = json.loads(manifest)  # section 8
        self.features = self.manifest["attributes"]["features"]  # section 5
        self.encodings = self.features["encodings"]
        self.array = cache(lambda name: self.root[name])  # opened once, read by slices

    def parts(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Number of each part, and the SHA-256 of its arrays (section 8)."""
        listed = self.manifest["parts"]
        if isinstance(listed, list):  # version 1
            for part in listed:
                yield part["part"], {k: entry["sha256"] for k, entry in part["arrays"].items()}
            return
        for page in range(-(-listed["number"] // listed["page"])):
            columns = listed["columns"]
            counts, sums = (self.page(f"{page}/{key}") for key in ("counts", "sha256"))
            for number, row in zip(counts[:, 0].tolist(), sums, strict=True):
                hexed = (digest.tobytes().hex() for digest in row.reshape(-1, 32))
                yield number, dict(zip(columns, hexed, strict=True))

    def page(self, name: str) -> Array:
        """An array of the index of version 2."""
        array: Array = self.array(f"index/{name}")[:]
        entry = self.manifest["parts"]["arrays"][name]
        if hashlib.sha256(array.tobytes()).hexdigest() != entry["sha256"]:
            raise ValueError(f"index/{name} is not what the manifest says")
        return array

    def check(self) -> None:
        """Compare every array with the manifest. Raises ValueError."""
        sums = {name: entry["sha256"] for name, entry in self.manifest["arrays"].items()}
        for where, arrays in [("", sums), *((f"parts/{n}/", a) for n, a in self.parts())]:
            for name, sha256 in arrays.items():
                array = self.array(where + name)[:]
                if hashlib.sha256(array.tobytes()).hexdigest() != sha256:
                    raise ValueError(f"{where}{name} is not what the manifest says")

    def __iter__(self) -> Iterator[Json]:
        for number, _ in self.parts():
            here = f"parts/{number}"
            start = self.array(f"{here}/sequence/token_start")[:].tolist()
            pair = 0  # entries of attention maps before this sequence
            for s, (a, b) in enumerate(zip(start, start[1:], strict=False)):
                record = self.sequence(here, s, a, b)
                views = range(self.features["views"])
                record["views"] = [self.view(f"{here}/view{i}", record, s, pair) for i in views]
                yield record
                pair += (b - a) ** 2

    def sequence(self, here: str, s: int, a: int, b: int) -> Json:
        """Sequence s of a part, which is its tokens a..b (section 6)."""
        record = {key: self.array(f"{here}/token/{key}")[a:b] for key in ("id", "begin", "end")}
        first, last = self.array(f"{here}/sequence/text_start")[s : s + 2].tolist()
        record["text"] = self.array(f"{here}/text/utf8")[first:last].tobytes().decode("utf-8")
        for key in ("document", "document_begin", "hard_cut"):
            record[key] = self.array(f"{here}/sequence/{key}")[s]
        task = self.features.get("task", {"kind": None})["kind"]
        if task == "classification":
            record["label"] = self.array(f"{here}/sequence/label")[s]
        elif task == "tagging":
            record["tag"] = self.array(f"{here}/token/tag")[a:b]
        if "embedding" in self.features:
            record["embedding"] = self.embedding(here, s)
        return record | {"special": self.array(f"{here}/token/special")[a:b], "rows": (a, b)}

    def embedding(self, here: str, s: int) -> Array:
        """The vector of sequence s of a part, float32 [W]."""
        arrays = {"values": self.array(f"{here}/sequence/embedding/values")[s : s + 1]}
        encoding = self.encodings["embedding"]
        if encoding["encoding"] != "float32":
            arrays["scale"] = self.array(f"{here}/sequence/embedding/scale")[s : s + 1]
        vectors = decode_scaled(arrays["values"], arrays.get("scale"), encoding)
        return np.asarray(vectors[0, : self.features["embedding"]["width"]])

    def view(self, here: str, record: Json, s: int, pair: int) -> Json:
        """What the teacher gave for a sequence in one view."""
        (a, b), spans = record["rows"], np.empty((0, 3), np.int32)
        if not here.endswith("view0"):  # characters begin, end and the action of masked words
            first, last = self.array(f"{here}/mask/start")[s : s + 2].tolist()
            columns = [self.array(f"{here}/mask/{key}") for key in ("begin", "end", "action")]
            spans = np.stack([column[first:last] for column in columns], axis=1)
        # A token is masked if it shares a character with a masked word.
        begin = np.maximum(record["begin"][:, None], spans[:, 0])
        end = np.minimum(record["end"][:, None], spans[:, 1])
        view: Json = {"spans": spans, "mask": (begin < end).any(axis=1), "attention": {}}
        view["hidden"] = {n: self.hidden(here, n, a, b) for n in self.features["hidden"]}
        for name in self.features["attention"]:
            values = self.array(f"{here}/attention/{name}/values")[pair : pair + (b - a) ** 2]
            if self.encodings["attention"]["encoding"] != "float32":  # square, coarse
                values = (values.astype(np.float32) / 255) ** 2
            view["attention"][name] = values.reshape(b - a, b - a)
        if self.features["logits"]:
            view["logits"] = self.logits(f"{here}/logits", a, b)
        if "label" in record:
            view["classes"] = self.array(f"{here}/classes/values")[s]
        if "tag" in record:
            view["tags"] = self.array(f"{here}/tags/values")[a:b]
        return view

    def hidden(self, here: str, name: str, a: int, b: int) -> Array:
        """Hidden states float32 [T, D]."""
        encoding = self.encodings["hidden"]
        values: Array = self.array(f"{here}/hidden/{name}/values")[a:b]
        if encoding["encoding"] == "float32":
            return values
        z = decode_scaled(values, self.array(f"{here}/hidden/{name}/scale")[a:b], encoding)
        calibration = [self.array(f"calibration/hidden/{name}/{k}") for k in ("mean", "deviation")]
        mean, deviation = (array[:] for array in calibration)
        kept = z[:, : self.features["width"]]  # an odd width has a half over
        return np.asarray(kept * deviation + mean)

    def logits(self, here: str, a: int, b: int) -> Json:
        """The arrays of the store's tier. Logits of tier `head` are values @ weight.T + bias."""
        keys: Json = {"topk": ("ids", "logprobs", "rest"), "sample": (), "head": ("values",)}
        tier = self.features["logits"]["tier"]
        rows = {key: self.array(f"{here}/{key}")[a:b] for key in ("log_partition", *keys[tier])}
        if tier == "topk":
            for key in ("logprobs", "rest"):
                rows[key] = decode_logs(rows[key], self.encodings[key])
        elif tier == "sample":  # token t of the sequence has start[t]..start[t + 1] of the others
            start = self.array(f"{here}/start")[a : b + 1]
            first, last = start[0], start[-1]
            rows |= {key: self.array(f"{here}/{key}")[first:last] for key in ("ids", "counts")}
            rows["start"] = start - first
        else:
            encoding = self.encodings["head"]
            scale = self.array(f"{here}/scale")[a:b] if encoding["encoding"] == "int8" else None
            rows["values"] = decode_scaled(rows["values"], scale, encoding)
        return rows


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python read_store.py STORE")
    for record, _ in zip(Store(sys.argv[1]), range(3), strict=False):
        masked = [record["text"][b:e] for view in record["views"] for b, e, _ in view["spans"]]
        print(f"{record['text']!r}: {len(record['id'])} tokens, masked {masked}")
