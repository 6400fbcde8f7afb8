"""Schemas of captures: type, shape and range of each column or tensor, checked when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

OTHER = "the file is damaged or of another format"
AGAIN = "capture this sample again, or remove it"


@dataclass(frozen=True)
class NumberKind:
    """Describes a kind of number.

    description: its name in messages. kinds: letters of the accepted NumPy dtypes (`dtype.kind`).
    least, most: the range. dtype: the dtype to which numbers are converted; None: unchanged.
    """

    description: str
    kinds: str
    least: float
    most: float
    dtype: Any


INFINITE = float("inf")
# A store must not hold a larger state, whose square is infinite in float32 (FORMAT.md, 6).
SQUARE = float(np.finfo(np.float32).max) ** 0.5
KINDS = {
    # The vocabulary of a store has at most 2^31 ids (FORMAT.md, 5).
    "ids": NumberKind("whole numbers from 0", "iu", 0, 2**31 - 1, np.int64),
    "low": NumberKind("whole numbers below 65,536", "iu", 0, 2**16 - 1, np.int32),
    "bits": NumberKind("0 or 1", "biu", 0, 1, np.int32),
    "mask": NumberKind("0 or 1", "biuf", 0, 1, np.float32),
    "bytes": NumberKind("whole numbers below 256", "iu", 0, 255, np.uint8),
    # DistillKit packs ids into int64 and writes them as uint64: neither type holds both.
    "words": NumberKind("whole numbers", "iu", -(2**63), 2**64 - 1, None),
    "floats": NumberKind("finite numbers", "f", -INFINITE, INFINITE, np.float32),
    "states": NumberKind("finite numbers", "f", -SQUARE, SQUARE, np.float32),
    "doubles": NumberKind("finite numbers", "f", -INFINITE, INFINITE, np.float64),
    "logs": NumberKind("log-probabilities", "f", -INFINITE, INFINITE, np.float32),
}
"""In `logs`, -inf marks an empty entry."""


@dataclass(frozen=True)
class Numbers:
    """Describes the expected numbers of a column or tensor of a capture.

    kind: a name in KINDS. dims: names of the dimensions; dimensions with the same name have the
    same size, at least 1, or 0 with `may_be_empty`. batched: whether an additional first dimension
    of size 1 is accepted.
    """

    name: str
    kind: str
    dims: tuple[str, ...]
    optional: bool = False
    batched: bool = False
    may_be_empty: bool = False

    @property
    def expected(self) -> str:
        """Describe the expected numbers and dimensions, for messages."""
        return f"{KINDS[self.kind].description} [{', '.join(self.dims)}]"

    def array(self, value: Any, where: str) -> Array:
        """Return the numbers as an array. Raises UserError if they do not fit the schema."""
        kind = KINDS[self.kind]
        if value is None:
            raise UserError(
                f"{where}: has no {self.name} ({self.expected}); the file is of another format"
            )
        array = value if type(value).__module__ == "numpy" else _of_tensor(value, self, where)
        if self.batched and array.ndim == len(self.dims) + 1 and array.shape[0] == 1:
            array = array[0]
        if not array.size:
            array = array.astype(kind.dtype or np.int64)  # an empty array has no reliable dtype
        if array.ndim != len(self.dims) or array.dtype.kind not in kind.kinds:
            raise UserError(
                f"{where}: {self.name} is {array.dtype}{list(array.shape)}, expected"
                f" {self.expected}; {OTHER}"
            )
        self._check_values(array, kind, where)
        if kind.dtype is None:
            return array
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is reported below
            cast: Array = np.asarray(array, kind.dtype)
        # Only a conversion to fewer bytes can overflow.
        if array.dtype.itemsize > cast.dtype.itemsize and cast.dtype.kind == "f" and cast.size:
            self._refuse(self._infinite(cast), "is beyond float32", where)
        if self.kind == "states":
            self._refuse(np.abs(cast) > kind.most, "has a square beyond float32", where)
        return cast

    def _check_values(self, array: Array, kind: NumberKind, where: str) -> None:
        if array.dtype.kind == "f":
            self._refuse(self._infinite(array), "is NaN or infinite", where)
        if self.kind == "mask":
            self._refuse((array != 0) & (array != 1), f"is not {kind.description}", where)
        elif array.dtype.kind in "iu":
            bad = (array < kind.least) | (array > kind.most)
            self._refuse(bad, f"is not among {kind.description}", where)

    def _infinite(self, values: Array) -> Array:
        if self.kind == "logs":  # -inf marks an empty entry
            return np.asarray(np.isnan(values) | np.isposinf(values))
        return ~np.isfinite(values)

    def _refuse(self, bad: Array, fault: str, where: str) -> None:
        """Raise UserError for the first number for which `bad` is true."""
        if bad.any():
            row = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
            unit = self.dims[0].removesuffix("s")
            raise UserError(f"{where}, {unit} {row}: {self.name} {fault}; {AGAIN}")


def _of_tensor(value: Any, field: Numbers, where: str) -> Array:
    """Return the numbers of a tensor. Raises UserError unless it is dense and completely stored."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise UserError(
            f"{where}: {field.name} is a {type(value).__name__}, expected a tensor of"
            f" {field.expected}; {OTHER}"
        )
    plain = value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"
    # Strides of 0 declare any number of elements over a few bytes; a copy would take the memory.
    if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise UserError(f"{where}: {field.name} is not a dense tensor of stored numbers; {OTHER}")
    if value.is_complex():
        raise UserError(f"{where}: {field.name} is complex, expected {field.expected}; {OTHER}")
    try:
        # NumPy lacks bfloat16 and the float types of 8 bits.
        narrow = value.is_floating_point() and value.element_size() < 4
        narrow &= value.dtype != torch.float16
        return np.asarray((value.float() if narrow else value).detach().numpy())
    except (TypeError, RuntimeError):
        raise UserError(
            f"{where}: {field.name} is {value.dtype}, expected {field.expected}; {OTHER}"
        ) from None


def checked(fields: Iterable[Numbers], values: Mapping[str, Any], where: str) -> dict[str, Array]:
    """Return the arrays of a file or row by name. Optional fields may be missing.

    Raises UserError for numbers that do not fit the fields, and if dimensions of one name differ in
    size.
    """
    arrays, sizes = dict[str, Array](), dict[str, tuple[int, str]]()
    for field in fields:
        if field.optional and values.get(field.name) is None:
            continue
        arrays[field.name] = field.array(values.get(field.name), where)
        for dim, size in zip(field.dims, arrays[field.name].shape, strict=True):
            expected, name = sizes.setdefault(dim, (size, field.name))
            if expected != size:
                raise UserError(
                    f"{where}: {name} has {expected:,} {dim}, and {field.name} {size:,}; {OTHER}"
                )
            if not size and not field.may_be_empty:
                raise UserError(f"{where}: {field.name} holds no {dim}; remove this sample")
    return arrays
