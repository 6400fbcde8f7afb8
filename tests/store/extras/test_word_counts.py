"""Word counts in a store are stored and copied; invalid counts are refused."""

from pathlib import Path

import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.extras.word_counts import COUNT, TEXT, WordCounts
from teachonce.store.tools.copy import convert
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.making.stores import begin, features_of, make_part, put_part

FEATURES = features_of(tier=None)
COUNTS = {"река": 2**40, "don't": 3, "🙂": 2}


class Raw(dict[str, Array]):
    """Arrays as given, valid or not."""

    def arrays(self) -> dict[str, Array]:
        return self


def written(path: Path, more: WordCounts | Raw) -> Path:
    writer = begin(path, FEATURES, extras=(more,))
    put_part(writer, 0, make_part(FEATURES, 0))
    writer.seal()
    return path


@pytest.mark.parametrize("ext", ["zarr", "h5"])
@pytest.mark.parametrize("counts", [COUNTS, {}])
def test_kept_and_copied(tmp_path: Path, ext: str, counts: dict[str, int]) -> None:
    path = tmp_path / f"a.{ext}"
    begin(path, FEATURES, extras=(WordCounts(counts | {"once": 1}),)).close()
    assert WordCounts.unfinished(path) == WordCounts(counts)
    convert(written(path, WordCounts(counts)), tmp_path / "b.h5")
    found = WordCounts.stored(open_store(tmp_path / "b.h5"))
    assert found == WordCounts(counts) and verify(tmp_path / "b.h5").problems == []
    assert WordCounts(COUNTS).of(["река", "once", "🙂"]).tolist() == [2**40, 1, 2]


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        (b"a\nb\n", np.array([2, 3, 4]), "is not int64 [2] of 2 or more"),
        (b"a\nb\n", np.array([2, 1]), "is not int64 [2] of 2 or more"),
        (b"a\nb\n", np.array([2.0, 3.0]), "is not int64 [2]"),
        (b"a\na\n", np.array([2, 3]), "not in ascending order"),
        (b"b\na\n", np.array([2, 3]), "not in ascending order"),
        (b"\xff\n", np.array([2]), "is not UTF-8"),
    ],
)
def test_what_is_no_counts(tmp_path: Path, text: bytes, count: Array, message: str) -> None:
    arrays = Raw({TEXT: np.frombuffer(text, np.uint8), COUNT: count})
    path = written(tmp_path / "a.zarr", arrays)
    (line,) = verify(path).problems
    assert message in line and "\n" not in line
    with pytest.raises(StoreError, match="calibration/words"):
        convert(path, tmp_path / "b.zarr")
