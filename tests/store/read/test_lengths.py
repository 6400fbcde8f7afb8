"""Batches are planned from the sequence lengths in the manifest, without opening parts."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import teachonce.store.write.tree
from teachonce.store import StoreError, open_store
from teachonce.store.containers.hdf5 import file as hdf5_file
from teachonce.store.containers.untrusted import Folder
from teachonce.store.format.layout import Counts, PartShapes, part_arrays
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.integrity.damage import flip_in
from tests.making.stores import begin, features_of, make_part, make_store, put_part
from tests.store.containers.test_untrusted import edit_manifest
from tests.store.tools.test_repair import EXT, contents

Copy = Callable[..., Path]
FORGED = ["altered file manifest/zarr.json"]  # by `edit_manifest`, whatever the edit
Made = Callable[..., Any]
STARTS = "parts/1/sequence/token_start"


def stored_lengths(path: Path) -> Array:
    fs = open_store(path)
    return np.concatenate([np.diff(fs.part(n).token_start) for n in range(3)])


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize(("longest", "size"), [(255, 1), (256, 2), (65536, 4)])
def test_the_manifest_has_the_lengths_in_the_smallest_type(
    tmp_path: Path, ext: str, longest: int, size: int
) -> None:
    features = dataclasses.replace(
        features_of(tier=None), max_length=longest, hidden=("mean",), attention=(), views=1
    )
    made = make_store(tmp_path / f"a.{ext}", features, parts=2)
    expected = [n for part in made for n in part.token_counts]
    fs = open_store(tmp_path / f"a.{ext}")
    known = fs.manifest.lengths
    assert known is not None and known.itemsize == size and known.dtype.kind == "u"
    assert known.tolist() == expected and fs.lengths(7, 20).tolist() == expected[7:20]


def test_a_store_without_lengths_reads_the_same(copy: Copy, made: Made) -> None:
    """A store without lengths in its manifest (old, or too large) gives the same batches."""
    path, whole = copy("zarr"), open_store(made("zarr")[0])
    edit_manifest(path, lambda m: m.pop("lengths"))
    plain = open_store(path)
    assert plain.manifest.lengths is None and verify(path).problems == FORGED
    assert plain.blocks(50).tolist() == whole.blocks(50).tolist()
    assert plain.batch_count(1, 2, 200) == whole.batch_count(1, 2, 200)
    for one, other in zip(plain.stream(1, 2, 200), whole.stream(1, 2, 200), strict=True):
        assert one.index.tolist() == other.index.tolist()
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_manifest_that_would_be_too_large_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachonce.store.write.tree, "MAX_BYTES", 1000)
    make_store(tmp_path / "a.zarr", features_of(), parts=1)
    fs = open_store(tmp_path / "a.zarr")
    assert fs.manifest.lengths is None and len(fs.blocks(50)) > 1


def packed(lengths: Any) -> str:
    return base64.b64encode(np.asarray(lengths, np.uint8).tobytes()).decode()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "not base64"),
        ([7, 8], "not base64"),
        ("*" * 48, "not base64"),
        ("é", "not base64"),
        ("", r"lengths are 0 bytes, expected 36 x 1"),
        (packed(range(35)), r"lengths are 35 bytes, expected 36 x 1"),
    ],
)
def test_lengths_of_another_form_are_refused(copy: Copy, value: Any, message: str) -> None:
    path = copy("zarr")
    edit_manifest(path, lambda m: m.update(lengths=value))
    with pytest.raises(StoreError, match=message) as caught:
        open_store(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("lie", ["swapped", "longest"])
def test_lengths_that_a_part_does_not_have(copy: Copy, lie: str) -> None:
    """Forged lengths are refused when the part is used, and `verify` reports them."""
    path = copy("zarr")
    before, lengths = contents(path), stored_lengths(path)
    other = 12 + int(np.flatnonzero(lengths[12:24] != lengths[12])[0])
    if lie == "swapped":
        lengths[[12, other]] = lengths[[other, 12]]
    else:
        lengths[12:24] = 255
    edit_manifest(path, lambda m: m.update(lengths=packed(lengths)))
    fs = open_store(path)
    assert fs[11].text and fs[24].text
    for read in (lambda: fs[12].token_ids, lambda: list(fs.stream(0, 0, 300))):
        with pytest.raises(StoreError, match="part 1: .* give different lengths") as caught:
            read()
        assert "\n" not in str(caught.value)
    report = verify(path)
    assert report.damaged_parts() == {1} and "different lengths" in str(report.problems)
    left, _ = repair(path)
    assert left == 2
    make_store(path, features_of())
    assert verify(path).problems == [] and contents(path) == before


def test_a_sequence_without_a_token_is_refused(store: Path) -> None:
    """A sequence without a token is refused, even if all other numbers of the store agree."""
    array: Any = zarr.open_array(store / "parts/0/sequence/token_start", mode="r+")
    starts = array[:]
    shortest = 1 + int(np.argmin(starts[2:] - starts[:-2]))  # among all pairs of neighbours
    starts[shortest] = starts[shortest - 1]
    array[:] = starts
    squares = int((np.diff(starts) ** 2).sum())
    edit_manifest(
        store, lambda m: m.pop("lengths") and m["parts"][0]["counts"].update(squares=squares)
    )
    with pytest.raises(StoreError, match="part 0: a sequence has no token"):
        open_store(store)[0].token_ids  # noqa: B018


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_damage_that_planning_no_longer_meets(store: Path) -> None:
    """Damage in a part does not stop the planning of an epoch, but stops its reading."""
    whole = open_store(store).batch_count(0, 0, 200)
    flip_in(store, STARTS, 5)
    fs = open_store(store)
    assert fs.batch_count(0, 0, 200) == whole
    with pytest.raises(StoreError, match="token_start"):
        list(fs.stream(0, 0, 200))
    assert verify(store).damaged_parts() == {1}


@pytest.mark.parametrize("ext", EXT)
def test_a_part_that_lost_its_lengths_is_not_sealed(tmp_path: Path, ext: str) -> None:
    """A part with damaged lengths is not sealed: it is named, and written again."""
    features, path = features_of(tier=None), tmp_path / f"a.{ext}"
    make_store(tmp_path / f"sound.{ext}", features)
    writer = begin(path, features)
    for number in range(3):
        put_part(writer, number, make_part(features, number))
    lost = path / "parts/1" if ext == "zarr" else Path(f"{path}.parts/1.h5")
    flip_in(path if ext == "zarr" else lost, STARTS, 5)
    with pytest.raises(
        StoreError, match="token_start.*`feature-store repair /.* quarantines part 1"
    ) as caught:
        writer.seal()
    assert "\n" not in str(caught.value)
    assert not any(sink.file for sink in hdf5_file._SINKS)  # the new file is closed
    writer.close()
    assert open_store(path, allow_partial=True).meta["state"] == "writing"
    left, report = repair(path)
    assert left == 2 and report.damaged_parts() == {1} and not lost.exists()
    make_store(path, features)
    one, other = (open_store(tmp_path / f"{name}.{ext}") for name in ("a", "sound"))
    assert one.manifest.to_bytes() == other.manifest.to_bytes()


NUMBER = st.integers(0, 10**6)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["default", "small", "exact"]),
    st.sampled_from(["topk", "sample", "head", "classification", "tagging", None]),
    st.integers(1, 3),
    st.tuples(NUMBER, NUMBER, NUMBER, NUMBER),
    st.lists(NUMBER, min_size=6, max_size=6),
)
def test_shapes_of_parts_are_those_of_their_arrays(
    codec: str, tier: str | None, views: int, sizes: tuple[int, int, int, int], ragged: list[int]
) -> None:
    features = features_of(codec, tier, views)
    counts = Counts(*sizes, tuple(ragged[:views]), tuple(ragged[3 : 3 + views]))
    specs = part_arrays(features, counts).items()
    expected = {name: (spec.shape, spec.dtype.name) for name, spec in specs}
    found = PartShapes(features).of(counts)
    assert found == expected and list(found) == list(expected)


def test_no_path_leaves_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "a", tmp_path / "b"
    for folder in (inside / "x/y", outside / "y"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("text")
    (inside / "out").symlink_to(outside)
    (inside / "in").symlink_to(inside / "x")
    inside_only = Folder(str(inside))
    for name in ("x/y/file", "in/y/file", "x/none/file"):
        inside_only.check(name)
    climbing = ("../b/y/file", "x/../../b/y/file", "in/../../b/file", "/etc/hostname")
    for name in ("out/y/file", "out/file", *climbing):
        for _ in range(2):  # a part that was refused once is not trusted later
            with pytest.raises(StoreError, match="link to a place outside the store"):
                inside_only.check(name)
