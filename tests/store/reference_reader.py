"""Read a whole feature store without this software: Zarr with NumPy, and numcodecs for Blosc; HDF5
with h5py and hdf5plugin.

It was written from store/FORMAT.md alone; the comments name its sections. The tests compare this
software with it. `examples/read_store.py` is a short reader. One part is in memory at a time, and
all data read are compared with their checksums.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]
OBJECTS = ("identity", "features", "software", "arrays")


def read_zarr(folder: Path) -> Array:
    """Read an array of a Zarr folder: one shard, which ends with its chunk index (section 3)."""
    about = json.loads((folder / "zarr.json").read_bytes())
    shape, dtype = about["shape"], np.dtype(about["data_type"]).newbyteorder("<")
    if 0 in shape:
        return np.empty(shape, dtype)
    whole, sharding = about["chunk_grid"]["configuration"], about["codecs"][0]["configuration"]
    size, packed = sharding["chunk_shape"], any(c["name"] == "blosc" for c in sharding["codecs"])
    grid = [math.ceil(n / m) for n, m in zip(whole["chunk_shape"], size, strict=True)]
    shard = folder.joinpath("c", *"0" * len(shape)).read_bytes()
    places = np.frombuffer(shard[-16 * math.prod(grid) - 4 : -4], "<u8").reshape(*grid, 2)
    found = np.empty([math.ceil(n / m) * m for n, m in zip(shape, size, strict=True)], dtype)
    for number in np.ndindex(*(math.ceil(n / m) for n, m in zip(shape, size, strict=True))):
        begin, length = places[number].tolist()
        chunk = shard[begin : begin + length - 4]  # the last 4 bytes are a CRC
        if packed:
            from numcodecs.blosc import Blosc

            chunk = Blosc().decode(chunk)
        rows = (slice(i * m, (i + 1) * m) for i, m in zip(number, size, strict=True))
        found[tuple(rows)] = np.frombuffer(chunk, dtype).reshape(size)
    return found[tuple(map(slice, shape))]


def open_tree(path: Path) -> tuple[Any, Json]:
    """Return a function that reads an array by path, and the root attributes (sections 3, 4)."""
    if path.suffix != ".h5":
        attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
        return lambda name: read_zarr(path / name), attributes
    import h5py
    import hdf5plugin  # noqa: F401  registers filter 32001, Blosc

    root = h5py.File(path, "r")
    texts = {k: v.decode() for k, v in root.attrs.items() if isinstance(v, bytes)}
    attributes = {k: json.loads(v) if k in OBJECTS else v for k, v in texts.items()}
    return lambda name: root[name][:], attributes | {"version": int(root.attrs["version"])}


def spans_of(part: Json, group: str, number: str, s: int) -> Array:
    """Return the spans of sequence s, int32 [M, 3]: begin, end, and a number."""
    at = slice(*part[f"{group}/start"][s : s + 2])
    return np.stack([part[f"{group}/{key}"][at] for key in ("begin", "end", number)], 1)


def decode_logs(codes: Array, encoding: Json) -> Array:
    """Decode log-probabilities, float32 (section 7)."""
    values = codes.astype(np.float32)
    if encoding["encoding"] == "fixed":
        return np.where(codes == 65535, -np.inf, -values / 1024)
    if encoding["encoding"] == "root":
        return np.where(codes == 255, -np.inf, -((values / 32) ** 2))
    return values  # float32


def decode_scaled(part: Json, path: str, rows: slice, encoding: Json, width: int) -> Array:
    """Decode rows of states, vectors or head inputs, float32, still normalised (section 7)."""
    values = part[f"{path}/values"][rows]
    if encoding["encoding"] in ("float32", "float16"):
        return np.asarray(values, np.float32)
    scale = part[f"{path}/scale"][rows].astype(np.float32)
    if encoding["encoding"] == "int8":
        return np.asarray(values * scale[:, None])
    # int4: two's complement. The even channel is the low half of a byte; an odd width leaves one
    # half unused.
    halves = np.stack([values & 15, values >> 4], axis=2).reshape(len(values), -1)[:, :width]
    codes = (halves.astype(np.float32) + 8) % 16 - 8
    return np.asarray(codes * np.repeat(scale, encoding["group"], axis=1)[:, :width])


class Store:
    """An open store: iterate over it for its sequences, each a dictionary."""

    def __init__(self, path: str | Path) -> None:
        self.array, attributes = open_tree(Path(path))
        if attributes["format"] != "teachonce" or attributes["version"] not in (1, 2):
            raise ValueError(f"{path}: not a feature store of version 1 or 2")
        if attributes["state"] != "sealed":
            raise ValueError(f"{path}: not finished")
        manifest = self.array("manifest").tobytes()
        seal = hashlib.sha256(manifest + attributes["created"].encode()).hexdigest()
        if seal != attributes["checksum"]:
            raise ValueError(f"{path}: the manifest does not match its checksum")
        self.manifest = json.loads(manifest)  # section 8
        self.features = self.manifest["attributes"]["features"]  # section 5
        self.encodings = self.features["encodings"]
        names = (f"calibration/hidden/{name}" for name in self.features["hidden"])
        self.calibration = {n: [self.outside(f"{n}/{k}") for k in ("mean", "deviation")]
                            for n in names}  # fmt: skip

    def read(self, name: str, sha256: str) -> Array:
        """Read a whole array. Raises ValueError if it does not match the manifest."""
        array: Array = self.array(name)
        if hashlib.sha256(array.tobytes()).hexdigest() != sha256:
            raise ValueError(f"{name} is not what the manifest says")
        return array

    def outside(self, name: str) -> Array:
        """Return an array outside of the parts."""
        return self.read(name, self.manifest["arrays"][name]["sha256"])

    def parts(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Return the number of each part, and the SHA-256 of its arrays (section 8)."""
        listed = self.manifest["parts"]
        if isinstance(listed, list):  # version 1
            for part in listed:
                yield part["part"], {k: entry["sha256"] for k, entry in part["arrays"].items()}
            return
        for page in range(-(-listed["number"] // listed["page"])):
            counts, sums = (
                self.read(f"index/{page}/{key}", listed["arrays"][f"{page}/{key}"]["sha256"])
                for key in ("counts", "sha256")
            )
            for number, row in zip(counts[:, 0].tolist(), sums, strict=True):
                hexed = (digest.tobytes().hex() for digest in row.reshape(-1, 32))
                yield number, dict(zip(listed["columns"], hexed, strict=True))

    def __iter__(self) -> Iterator[Json]:
        for number, sums in self.parts():
            part = {name: self.read(f"parts/{number}/{name}", sums[name]) for name in sums}
            edges = part["sequence/token_start"]
            # number of attention map entries
            squares = np.append(0, np.cumsum(np.diff(edges) ** 2))
            for s, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
                yield self.sequence(part, s, slice(a, b), slice(*squares[s : s + 2]))

    def sequence(self, part: Json, s: int, rows: slice, square: slice) -> Json:
        """Return sequence s of a part; it has these rows of tokens (section 6)."""
        one = ("document", "document_begin", "hard_cut", "label", "context")
        each = ("id", "begin", "end", "special", "tag", "learn")
        found = {key: part[f"sequence/{key}"][s] for key in one if f"sequence/{key}" in part}
        found |= {key: part[f"token/{key}"][rows] for key in each if f"token/{key}" in part}
        if self.features.get("messages"):  # characters begin, end and the role of each message
            found["messages"] = spans_of(part, "chat", "role", s)
        text = part["text/utf8"][slice(*part["sequence/text_start"][s : s + 2])]
        found["text"] = text.tobytes().decode("utf-8")
        if vector := self.features.get("embedding"):
            how = "sequence/embedding", slice(s, s + 1), self.encodings["embedding"]
            found["embedding"] = decode_scaled(part, *how, vector["width"])[0]
        views = range(self.features["views"])
        found["views"] = [self.view(part, f"view{i}", found, s, rows, square) for i in views]
        return found

    def view(self, part: Json, here: str, found: Json, s: int, rows: slice, square: slice) -> Json:
        """Return the teacher's output for a sequence in one view."""
        spans = np.empty((0, 3), np.int32)
        if here != "view0":  # characters begin, end and the action of masked words
            spans = spans_of(part, f"{here}/mask", "action", s)
        # A token is masked if it shares a character with a masked word.
        begin = np.maximum(found["begin"][:, None], spans[:, 0])
        end = np.minimum(found["end"][:, None], spans[:, 1])
        view: Json = {"spans": spans, "mask": (begin < end).any(axis=1), "attention": {}}
        view["hidden"] = {n: self.hidden(part, here, n, rows) for n in self.features["hidden"]}
        for name in self.features["attention"]:
            values = part[f"{here}/attention/{name}/values"][square].reshape(2 * [len(begin)])
            if self.encodings["attention"]["encoding"] != "float32":  # square, coarse
                values = (values.astype(np.float32) / 255) ** 2
            view["attention"][name] = values
        if self.features["logits"]:
            view["logits"] = self.logits(part, f"{here}/logits", rows)
        outputs: Json = {"classes": s, "tags": rows}
        for key, where in outputs.items():
            if f"{here}/{key}/values" in part:
                view[key] = part[f"{here}/{key}/values"][where]
        return view

    def hidden(self, part: Json, here: str, name: str, rows: slice) -> Array:
        """Return hidden states, float32 [T, D]."""
        encoding, width = self.encodings["hidden"], self.features["width"]
        values = decode_scaled(part, f"{here}/hidden/{name}", rows, encoding, width)
        if encoding["encoding"] == "float32":
            return values
        mean, deviation = self.calibration[f"calibration/hidden/{name}"]
        return np.asarray(values * deviation + mean)

    def logits(self, part: Json, here: str, rows: slice) -> Json:
        """Return the arrays of the store's tier. Logits of tier `head`: values @ weight.T +
        bias."""
        tier, size = self.features["logits"]["tier"], self.features["logits"]["size"]
        found = {"log_partition": part[f"{here}/log_partition"][rows]}
        if self.features["logits"].get("observed"):
            found["observed"] = decode_logs(part[f"{here}/observed"][rows], self.encodings["rest"])
        if tier == "topk":
            if self.features["logits"].get("ranked"):
                found["ids"] = part[f"{here}/distinct"][part[f"{here}/places"][rows]]
            else:
                found["ids"] = part[f"{here}/ids"][rows]
            for key in ("logprobs", "rest"):
                found[key] = decode_logs(part[f"{here}/{key}"][rows], self.encodings[key])
        elif tier == "sample":  # the ids and counts of token t are start[t]..start[t + 1]
            start = part[f"{here}/start"][rows.start : rows.stop + 1]
            for key in ("ids", "counts"):
                found[key] = part[f"{here}/{key}"][start[0] : start[-1]]
            found["start"] = start - start[0]
        else:
            found["values"] = decode_scaled(part, here, rows, self.encodings["head"], size)
        return found
