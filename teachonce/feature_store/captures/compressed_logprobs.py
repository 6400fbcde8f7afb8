"""DistillKit's compression of log-probabilities: its settings, decoding, and exact encoding.

After distillkit/compression of github.com/arcee-ai/DistillKit, commit a61c2e7. The top-k ids of a
token are sorted by falling log-probability. The first `exact_k` values are stored exactly. The tail
is stored as the coefficients of a fitted curve and quantised residuals. Ids are packed bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError, first_line
from teachonce.support.parsing import read_small

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
TERMS = ("sqrt", "exp")
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """Describes how the residuals of `elements` consecutive ids are stored: with `bits` bits each,
    and multiplied by one number of dtype `scale`."""

    scale: str
    bits: int
    elements: int


@dataclass(frozen=True)
class Compression:
    """Holds the settings of a capture. Fields have the names of its `compression_config.yaml`.

    d: size of the vocabulary. k: ids stored for a token. exact_k: ids with exact values.
    """

    d: int
    k: int
    exact_k: int
    # The defaults of DistillKit (`DistributionQuantizationConfig`): its files may leave these out.
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    residual_bins: tuple[Bin, ...] = ()
    delta_encoding: bool = True
    normalize_t: bool = False

    @property
    def widths(self) -> list[int]:
        """Return the number of bytes that a token has in each of the two columns:
        log-probabilities, ids."""
        bins = sum(BYTES[b.scale] + -(-b.bits * b.elements // 8) for b in self.residual_bins)
        terms = len(self.polynomial_terms) * BYTES[self.term_dtype]
        logprobs = self.exact_k * BYTES[self.exact_dtype] + terms + bins
        return [logprobs, -(-self.k * index_bits(self.d) // 8)]

    def decode(self, data: Array, packed: Array) -> tuple[Array, Floats]:
        """Return ids int64 and log-probabilities float32 [T,k] of the stored columns."""
        return unpacked_ids(packed, index_bits(self.d), self.k), logprobs_of(data, self)


@dataclass(frozen=True)
class LegacyCompression:
    """Holds the settings of an older capture (`legacy_logit_compression`)."""

    d: int
    k: int
    exact_k: int
    polynomial_degree: int
    invert_polynomial: bool = True
    with_sqrt_term: bool = False

    @property
    def widths(self) -> list[int]:
        """Return the count of numbers that a token has in each of the three columns: 64-bit words
        with ids, exact values, coefficients."""
        tail = self.polynomial_degree + 1 + self.with_sqrt_term if self.k > self.exact_k else 0
        return [-(-self.k // (64 // index_bits(self.d))), self.exact_k, tail]

    def decode(self, words: Array, exact: Array, terms: Array) -> tuple[Array, Floats]:
        """Return ids int64 and log-probabilities float32 [T,k] of the stored columns."""
        ids = words_of_ids(words.astype(np.int64), index_bits(self.d), self.k)
        return ids, legacy_logprobs_of(exact, terms, self)


def index_bits(vocabulary: int) -> int:
    """Return the number of bits of a packed id, rounded as DistillKit does."""
    # float32 as in DistillKit, so that rounding near powers of two is the same.
    return max(1, int(np.ceil(np.log2(np.float32(vocabulary)))))


def read_compression(path: Path) -> Compression | LegacyCompression:
    """Read the YAML settings of a capture, or of a training that reads the capture.

    Raises UserError if they do not describe a compression of DistillKit.
    """
    import yaml

    text = read_small(path)
    # Untrusted settings may be any value that YAML can write, so many errors are possible.
    try:
        settings = yaml.safe_load(text)
        # In the settings of a training the compression is nested in these keys.
        for key in ("teacher", "logprob_compressor", "legacy_logit_compression"):
            if isinstance(settings, Mapping) and isinstance(settings.get(key), Mapping):
                settings = settings[key]
        return _legacy(settings) if "polynomial_degree" in settings else _compression(settings)
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not the settings of DistillKit's compression ({first_line(error)}); give its"
            " compression_config.yaml, or the settings of a training that reads the capture"
        ) from None


def _compression(settings: Mapping[str, Any]) -> Compression:
    bins = tuple(
        Bin(
            _dtype(b["scale_dtype"], "scale_dtype"),
            _whole(b["element_bits"], "element_bits"),
            _whole(b["num_elements"], "num_elements"),
        )
        for b in settings["residual_bins"] or ()
    )
    terms = tuple(settings.get("polynomial_terms") or ())
    compression = Compression(
        d=_whole(settings["d"], "d"),
        k=_whole(settings["k"], "k"),
        exact_k=_whole(settings["exact_k"], "exact_k", 0),
        exact_dtype=_dtype(settings.get("exact_dtype", "float32"), "exact_dtype"),
        polynomial_terms=tuple(
            t if t in TERMS else _whole(t, "a polynomial term", 0) for t in terms
        ),
        term_dtype=_dtype(settings.get("term_dtype", "float32"), "term_dtype"),
        residual_bins=bins,
        delta_encoding=_flag(settings, "delta_encoding", True),
        normalize_t=_flag(settings, "normalize_t", False),
    )
    # Refused: what DistillKit refuses (`check_valid`), and a k that is larger than the vocabulary.
    tail = compression.k - compression.exact_k
    if compression.k > compression.d:
        raise ValueError("k is larger than d, the size of the vocabulary")
    # DistillKit allows up to 64 bits, but codes are int64 here, which hold 63.
    if tail < 0 or sum(b.elements for b in bins) > tail or any(b.bits > 63 for b in bins):
        raise ValueError("k, exact_k and residual_bins contradict one another")
    if tail and not (terms or bins):
        raise ValueError("exact_k is less than k, without polynomial_terms or residual_bins")
    return compression


def _legacy(settings: Mapping[str, Any]) -> LegacyCompression:
    compression = LegacyCompression(
        d=_whole(settings["vocab_size"], "vocab_size"),
        k=_whole(settings["k"], "k"),
        exact_k=_whole(settings["exact_k"], "exact_k", 0),
        polynomial_degree=_whole(settings["polynomial_degree"], "polynomial_degree", 0),
        invert_polynomial=_flag(settings, "invert_polynomial", True),
        with_sqrt_term=_flag(settings, "with_sqrt_term", False),
    )
    if not compression.exact_k <= compression.k <= compression.d:
        raise ValueError("k, exact_k and vocab_size contradict one another")
    return compression


def _flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false for {key}, got {value!r:.80}")
    return value


def _whole(value: object, name: str, least: int = 1) -> int:
    # 2^31: the largest vocabulary of a store (FORMAT.md, 5).
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**31:
        raise ValueError(f"expected a whole number from {least} for {name}, got {value!r:.80}")
    return value


def _dtype(value: object, name: str) -> str:
    if value not in BYTES:
        raise ValueError(f"expected one of {', '.join(BYTES)} for {name}, got {value!r:.80}")
    return str(value)


def unpacked_ids(data: Array, bits: int, count: int) -> Array:
    """Unpack ids, highest bit first: bytes uint8 [T,B] -> int64 [T,count]."""
    flat = np.unpackbits(data, axis=1, count=count * bits).reshape(len(data), count, bits)
    return flat @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def packed_ids(ids: Array, bits: int) -> Array:
    """Pack ids, highest bit first: [T,K] -> bytes uint8 [T,B]."""
    digits = (ids[..., None].astype(np.int64) >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(digits.astype(np.uint8).reshape(len(ids), -1), axis=1)


def words_of_ids(words: Array, bits: int, count: int) -> Array:
    """Unpack the older form, lowest bits first: words int64 [T,W] -> int64 [T,count].

    A word holds as many complete ids as fit into 64 bits.
    """
    per_word = 64 // bits
    shifts = (bits * np.arange(per_word)).astype(np.uint64)
    mask = np.uint64((1 << bits) - 1)
    ids = (words.astype(np.uint64)[..., None] >> shifts) & mask
    return ids.reshape(len(words), -1)[:, :count].astype(np.int64)


def _floats(data: Array, kind: str) -> Doubles:
    """Read little-endian bytes uint8 [T,n*size] of dtype `kind` as numbers float64 [T,n]."""
    if not data.shape[1]:
        return np.zeros(data.shape)
    # `view` requires contiguous rows, and the caller has cut columns out of them.
    raw = np.ascontiguousarray(data)
    if kind == "bfloat16":  # NumPy has no such dtype; its bits are the upper half of a float32
        upper = raw.view("<u2").astype(np.uint32) << 16
        return upper.view(np.float32).astype(np.float64)
    return raw.view(np.dtype(kind).newbyteorder("<")).astype(np.float64)


def curve(settings: Compression) -> Doubles:
    """Return the terms of the fitted curve at each position of the tail: float64 [k - exact_k,
    terms]."""
    tail = settings.k - settings.exact_k
    points = np.linspace(0, 1, tail) if settings.normalize_t else np.arange(tail, dtype=float)
    special = {"sqrt": np.sqrt, "exp": np.exp}
    columns = [
        special[term](points) if isinstance(term, str) else points**term
        for term in settings.polynomial_terms
    ]
    return np.stack(columns, axis=1)


def logprobs_of(data: Array, settings: Compression) -> Floats:
    """Decompress log-probabilities: bytes uint8 [T,width] -> float32 [T,k]."""
    rows, at = len(data), 0

    def take(size: int) -> Array:
        nonlocal at
        at += size
        return data[:, at - size : at]

    exact = _floats(take(settings.exact_k * BYTES[settings.exact_dtype]), settings.exact_dtype)
    tail = np.zeros((rows, settings.k - settings.exact_k))
    if settings.polynomial_terms:
        size = len(settings.polynomial_terms) * BYTES[settings.term_dtype]
        tail += _floats(take(size), settings.term_dtype) @ curve(settings).T
    first = 0
    for bin_ in settings.residual_bins:
        scale = _floats(take(BYTES[bin_.scale]), bin_.scale)
        codes = unpacked_ids(take(-(-bin_.bits * bin_.elements // 8)), bin_.bits, bin_.elements)
        # A code of one bit means -1 or 1; a code of n bits is a number plus 2^(n - 1).
        centred = codes * 2 - 1 if bin_.bits == 1 else codes - (1 << (bin_.bits - 1))
        tail[:, first : first + bin_.elements] += centred * scale
        first += bin_.elements
    logprobs = np.concatenate([exact, tail], axis=1)
    return (np.cumsum(logprobs, axis=1) if settings.delta_encoding else logprobs).astype(np.float32)


def legacy_logprobs_of(exact: Array, coefficients: Array, settings: LegacyCompression) -> Floats:
    """Decompress the older form: [T,exact_k] and coefficients [T,terms] -> float32 [T,k]."""
    if settings.k == settings.exact_k:
        return exact.astype(np.float32)
    # From 1 on: a negative power of 0 would be infinite.
    points = np.arange(1, settings.k - settings.exact_k + 1, dtype=float)
    sign = -1 if settings.invert_polynomial else 1
    columns = [points ** (sign * degree) for degree in range(settings.polynomial_degree + 1)]
    columns += [np.sqrt(points)] if settings.with_sqrt_term else []
    tail = coefficients.astype(np.float64) @ np.stack(columns, axis=1).T
    return np.concatenate([exact, tail], axis=1).astype(np.float32)


def exact_settings(vocabulary: int, k: int) -> dict[str, Any]:
    """Return the settings of a capture that stores all k values exactly, in float32."""
    return {
        "d": vocabulary,
        "k": k,
        "exact_k": k,
        "exact_dtype": "float32",
        "polynomial_terms": None,
        "term_dtype": "float32",
        "residual_bins": [],
        # Each value is stored by itself, because sums of differences would round it.
        "delta_encoding": False,
        "error_diffusion": False,
        "normalize_t": False,
    }
