"""Open a store with zarr, xarray or h5py directly: python examples/open_elsewhere.py STORE

Prints the tokens of the first sequence and the most likely ids of its second token.
store/FORMAT.md lists every array; examples/read_store.py reads a store with only NumPy.
"""

import sys
from typing import Any

import numpy as np

Sequence = tuple[str, list[int], list[int], list[float]]
PART = "parts/0"


def with_zarr(path: str) -> Sequence:
    import zarr

    root = zarr.open_group(path, mode="r")
    return first_sequence(lambda name: root[f"{PART}/{name}"])


def with_h5py(path: str) -> Sequence:
    import h5py
    import hdf5plugin  # noqa: F401  registers filter 32001, Blosc

    with h5py.File(path) as root:
        return first_sequence(lambda name: root[f"{PART}/{name}"])


def with_xarray(path: str) -> Sequence:
    import xarray

    def array(name: str) -> Any:
        group, _, leaf = name.rpartition("/")
        return xarray.open_zarr(f"{path}/{PART}/{group}", consolidated=False)[leaf]

    return first_sequence(lambda name: array(name).to_numpy())


def first_sequence(array: Any) -> Sequence:
    """Read the first sequence: text, token ids, and the top-k ids and log-probabilities of token 1.

    `array` returns an array of the part by its name.
    """
    end = int(array("sequence/token_start")[1])
    text = array("text/utf8")[: int(array("sequence/text_start")[1])].tobytes().decode()
    places, codes = (
        np.asarray(array(f"view0/logits/{name}")[1]) for name in ("places", "logprobs")
    )
    # Ids are stored as places in the part's list of distinct ids (FORMAT.md: `ranked`).
    best = np.asarray(array("view0/logits/distinct")[:])[places]
    # Codec `default` stores log-probabilities as whole multiples of -1/1024.
    logprobs = codes.astype(np.float32) / (-1024 if codes.dtype == np.uint16 else 1)
    return text, array("token/id")[:end].tolist(), best.tolist(), logprobs.tolist()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for reader in [with_h5py] if sys.argv[1].endswith(".h5") else [with_zarr, with_xarray]:
        print(reader.__name__, *reader(sys.argv[1]))
