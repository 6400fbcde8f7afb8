"""Stores from early releases of format version 1 must read the same for ever.

They were made once, with `python -m tests.store.golden.make FOLDER`, and committed with the values
read from them. If this test fails, the reader is wrong: never regenerate the stores to make it
pass. A later format version gets additional stores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from tests.store.golden.make import STORES, values_of

GOLDEN = Path(__file__).parent / "golden"


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, list) and np.asarray(expected).dtype.kind == "f":
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-7), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", STORES)
def test_golden_stores_read_as_they_did(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    fs = open_store(GOLDEN / name)
    assert len(fs) == 3 and fs.meta["version"] == 1
    assert_same(values_of(fs), expected, name)
    problems = verify(GOLDEN / name).problems
    if name not in ("default.zarr", "default.h5", "small.h5"):
        assert problems == []
    else:  # they hold a placeholder for a tokenizer
        assert len(problems) == 1 and "tokenizer.json in it cannot be loaded" in problems[0]
