"""Open a store with zarr, xarray or h5py alone: python examples/open_elsewhere.py STORE

Each gives the tokens of the first sequence, and the best logits of its second token.
store/FORMAT.md names every array; examples/read_store.py reads a store with NumPy alone.
"""

import sys
from typing import Any

import numpy as np

Found = tuple[str, list[int], list[int], list[float]]
PART = "parts/0"


def with_zarr(path: str) -> Found:
    import zarr

    root = zarr.open_group(path, mode="r")
    return _first(lambda name: root[f"{PART}/{name}"])


def with_h5py(path: str) -> Found:
    import h5py
    import hdf5plugin  # noqa: F401  registers filter 32001, Blosc

    with h5py.File(path) as root:
        return _first(lambda name: root[f"{PART}/{name}"])


def with_xarray(path: str) -> Found:
    import xarray

    def array(name: str) -> Any:
        group, _, leaf = name.rpartition("/")
        return xarray.open_zarr(f"{path}/{PART}/{group}", consolidated=False)[leaf]

    return _first(lambda name: array(name).to_numpy())


def _first(array: Any) -> Found:
    """Read the first sequence: its text, its tokens, and the best ids of token 1 with their
    log-probabilities, which codec `default` keeps in steps of 1/1024."""
    end = int(array("sequence/token_start")[1])
    text = array("text/utf8")[: int(array("sequence/text_start")[1])].tobytes().decode()
    best, codes = (np.asarray(array(f"view0/logits/{name}")[1]) for name in ("ids", "logprobs"))
    logs = codes.astype(np.float32) / (-1024 if codes.dtype == np.uint16 else 1)
    return text, array("token/id")[:end].tolist(), best.tolist(), logs.tolist()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for reader in [with_h5py] if sys.argv[1].endswith(".h5") else [with_zarr, with_xarray]:
        print(reader.__name__, *reader(sys.argv[1]))
