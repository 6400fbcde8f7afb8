"""Read a Zarr store with NumPy (numcodecs for Blosc): python examples/read_store.py STORE.zarr

Written from store/FORMAT.md only; the comments name its sections. Not implemented: int4, the tiers
sample and head, outputs of task heads, and all checksums except the manifest's.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_array(folder: Path) -> NDArray[Any]:
    """Read an array: one shard, with an index of its chunks at the end (section 3)."""
    about = json.loads((folder / "zarr.json").read_bytes())
    shape, dtype = about["shape"], np.dtype(about["data_type"]).newbyteorder("<")
    if 0 in shape:
        return np.empty(shape, dtype)
    inner, outer = about["codecs"][0]["configuration"], about["chunk_grid"]["configuration"]
    size = np.array(inner["chunk_shape"])
    grid, used = -(-np.array(outer["chunk_shape"]) // size), -(-np.array(shape) // size)
    shard = folder.joinpath("c", *"0" * len(shape)).read_bytes()
    index = np.frombuffer(shard[-16 * grid.prod() - 4 : -4], "<u8").reshape(*grid, 2)
    array = np.empty(used * size, dtype)
    for number in np.ndindex(*used):
        begin, length = index[number].tolist()
        chunk = shard[begin : begin + length - 4]  # the last 4 bytes are a CRC
        if any(codec["name"] == "blosc" for codec in inner["codecs"]):
            from numcodecs.blosc import Blosc

            chunk = Blosc().decode(chunk)
        corner = number * size
        array[tuple(map(slice, corner, corner + size))] = np.frombuffer(chunk, dtype).reshape(size)
    return array[tuple(map(slice, shape))]


def decode(path: Path, encoding: str) -> NDArray[Any]:
    """Return the values of an array, in float32 if it is encoded (section 7)."""
    if path.name == "ids" and not path.exists():  # ranked (section 6)
        distinct, places = (read_array(path.parent / name) for name in ("distinct", "places"))
        return np.take(distinct, places)
    codes = read_array(path)
    values = codes.astype(np.float32)
    if encoding == "int8":
        values *= read_array(path.parent / "scale")[:, None].astype(np.float32)
        if path.parts[-3] == "hidden":  # normalised by channel
            norm = path.parents[5] / "calibration/hidden" / path.parts[-2]
            values = values * read_array(norm / "deviation") + read_array(norm / "mean")
        return values
    if encoding == "fixed":
        return np.where(codes == 65535, -np.inf, values / -1024)
    if encoding in ("square", "coarse"):
        return np.asarray((values / 255) ** 2)
    if encoding in ("", "float32"):
        return codes
    raise ValueError(f"{path}: this reader does not implement the encoding {encoding}")


def read_store(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a store: arrays by path in a part, maps flattened, texts as str."""
    if not (path / "zarr.json").is_file():
        raise ValueError(f"{path}: not a Zarr store; give a folder STORE.zarr")
    root = json.loads((path / "zarr.json").read_bytes())["attributes"]  # section 4
    if root["format"] != "teachonce" or root["version"] not in (1, 2) or root["state"] != "sealed":
        raise ValueError(f"{path}: not a sealed store of version 1 or 2")
    manifest = read_array(path / "manifest").tobytes()
    if hashlib.sha256(manifest + root["created"].encode()).hexdigest() != root["checksum"]:
        raise ValueError(f"{path}: the manifest does not match its checksum")
    parts, features = json.loads(manifest)["parts"], root["features"]  # sections 8 and 5
    if root["version"] == 2:
        pages = range(-(-parts["number"] // parts["page"]))
        counts = [read_array(path / f"index/{page}/counts") for page in pages]
        parts = [{"part": number} for number in np.concatenate(counts)[:, 0]]
    how = {key: about["encoding"] for key, about in features["encodings"].items()}
    for part in (path / f"parts/{entry['part']}" for entry in parts):  # section 6
        tokens = read_array(part / "sequence/token_start")
        pairs = np.append(0, np.cumsum(np.diff(tokens) ** 2))
        arrays = {"text/utf8": ("", read_array(part / "sequence/text_start"))}
        arrays |= {f"token/{key}": ("", tokens) for key in ("id", "begin", "end", "special")}
        if "embedding" in features:
            arrays["sequence/embedding/values"] = how["embedding"], np.arange(len(tokens))
        for view in (f"view{i}" for i in range(features["views"])):
            if view != "view0":
                start = read_array(part / f"{view}/mask/start")
                arrays |= {f"{view}/mask/{key}": ("", start) for key in ("begin", "end", "action")}
            logits = features["logits"] or {}
            if logits.get("tier") == "topk":
                for key in ("ids", "logprobs", "rest"):
                    arrays[f"{view}/logits/{key}"] = how.get(key, ""), tokens
            if "observed" in logits:  # encoded like the rest
                arrays[f"{view}/logits/observed"] = how["rest"], tokens
            for kind, start in (("hidden", tokens), ("attention", pairs)):
                for name in features[kind]:
                    arrays[f"{view}/{kind}/{name}/values"] = how[kind], start
        decoded = [(key, decode(part / key, code), start) for key, (code, start) in arrays.items()]
        for s in range(len(tokens) - 1):
            sequence = {key: values[start[s] : start[s + 1]] for key, values, start in decoded}
            yield sequence | {"text/utf8": sequence["text/utf8"].tobytes().decode()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        first = next(read_store(Path(sys.argv[1])))
    except ValueError as error:
        sys.exit(str(error))
    for key, values in first.items():
        print(key, values if isinstance(values, str) else values.shape)
