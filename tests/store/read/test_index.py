"""A store of many parts has an index instead of a list of parts, read page by page."""

import resource
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import teachonce.store.format.index
import teachonce.store.write.tree
from teachonce.store import Features, FeatureStore, StoreError, open_store
from teachonce.store.format.index import CACHED_PAGES, IndexedLengths, IndexedParts, write_index
from teachonce.store.format.layout import Counts, PartShapes
from teachonce.store.format.manifest import Entry, Manifest, Part, digest, length_dtype
from teachonce.store.tools.copy import convert
from teachonce.store.tools.info import describe
from teachonce.store.tools.merge import merge
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.integrity.damage import flip
from tests.making.stores import SMALL, copied, features_of, make_store
from tests.store.reference_reader import Store
from tests.store.tools.test_repair import contents

EXT = pytest.mark.parametrize("ext", ["zarr", "h5"])
PARTS = 7


def keep_few(patch: pytest.MonkeyPatch, parts: int = 2) -> None:
    """Write an index for more than `parts` parts, with three parts a page."""
    patch.setattr(teachonce.store.write.tree, "FEW_PARTS", parts)
    patch.setattr(teachonce.store.format.index, "PAGE", 3)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_few(monkeypatch)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return pair(ext) -> the same store with an index, and without."""

    @cache
    def make(ext: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("pair")
        paths = [folder / f"many.{ext}", folder / f"few.{ext}"]
        for path, few in zip(paths, (2, PARTS), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                keep_few(patch, few)
                make_store(path, SMALL, PARTS)
        return paths

    return make


@pytest.fixture
def both(tmp_path: Path, many: None, ext: str, pair: Callable[[str], list[Path]]) -> list[Path]:
    """Return copies of such a pair."""
    return [copied(path, tmp_path / path.name) for path in pair(ext)]


def read(fs: FeatureStore) -> list[list[Any]]:
    """Return everything that a stream yields, and all single records."""
    batches = [
        [b.index.tolist(), b.token_ids.tolist(), b.texts, b.hidden["mean"].states().tolist()]
        for b in fs.stream(3, 1, 200, blocks=fs.blocks(50), pool_blocks=3)
    ]
    return batches + [[r.text, r.token_ids.tolist(), r.offsets.tolist()] for r in fs]


@EXT
def test_an_index_says_what_the_list_says(both: list[Path]) -> None:
    indexed, listed = map(open_store, both)
    assert (indexed.meta["version"], listed.meta["version"]) == (2, 1)
    assert list(indexed.manifest.parts) == listed.manifest.parts
    assert indexed.manifest.content() == listed.manifest.content()
    assert indexed.all_lengths().tolist() == listed.all_lengths().tolist()
    assert read(indexed) == read(listed)
    printed = [describe(fs) for fs in (indexed, listed)]
    assert {key for key in printed[0] if printed[0][key] != printed[1][key]} <= {
        *("path", "version", "created", "bytes_on_disk")
    }
    assert [verify(path).problems + verify(path).unknown for path in both] == [[], []]


@EXT
def test_another_program_reads_it(both: list[Path]) -> None:
    indexed, listed = map(Store, both)
    for one, other in zip(indexed, listed, strict=True):
        assert one["text"] == other["text"] and np.array_equal(one["id"], other["id"])


@pytest.mark.slow
@EXT
def test_copies_of_it_are_what_they_would_be(both: list[Path], tmp_path: Path, ext: str) -> None:
    convert(both[1], tmp_path / f"copy.{ext}")
    again, content = (open_store(path).manifest for path in (tmp_path / f"copy.{ext}", both[0]))
    assert again.attributes["version"] == 2 and again.content() == content.content()
    contents_of = []
    for number, sources in enumerate((both, [both[1], both[1]])):
        merge(sources, tmp_path / f"merged{number}.{ext}")
        contents_of.append(open_store(tmp_path / f"merged{number}.{ext}").manifest.content())
    assert contents_of[0] == contents_of[1]


@pytest.mark.slow
@pytest.mark.parametrize("ext", ["zarr"])
def test_a_damaged_index_is_reported_and_mended(both: list[Path]) -> None:
    path = both[0]
    before = contents(path)
    files = sorted(file for file in path.glob("index/**/c/**/0") if file.is_file())
    assert len(files) == 3 * 4 + 1
    for file in files[::3]:  # one of each kind
        flip(file, 1, 3)
        found = verify(path)
        assert (
            len(found.problems) == 1 and "index/" in found.problems[0] and not found.unknown_flaws
        )
        with pytest.raises(StoreError, match="repair"):
            read(open_store(path))
        _, report = repair(path)
        assert "repaired" in report.advice
        assert contents(path) == before


@pytest.mark.parametrize("ext", ["zarr"])
def test_parts_that_repair_quarantines_are_made_again(both: list[Path]) -> None:
    path = both[0]
    before = contents(path)
    flip(path / "parts/4/token/id/c/0", 1, 3)
    left, _ = repair(path)
    assert left == PARTS - 1
    assert open_store(path, allow_partial=True).meta["version"] == 1
    (path / "index/0/killed").write_bytes(b"as a killed sealing leaves it")
    make_store(path, SMALL, PARTS)
    assert contents(path) == before


class Reading:
    """Arrays of an index in memory, and the names of the arrays that were read."""

    def __init__(self, parts: list[Part], lengths: list[Array], features: Features) -> None:
        self.arrays: dict[str, Array] = {}
        self.names: list[str] = []
        pairs = zip(parts, lengths, strict=True)
        self.listed = write_index(pairs, features, self.arrays.__setitem__)
        self.features = features

    def read(self, name: str, entry: Entry) -> Array:
        self.names.append(name)
        assert Entry.of(self.arrays[name], None) == entry
        return self.arrays[name]

    def parts(self) -> IndexedParts:
        return IndexedParts(self.listed, self.features, "here", self.read)


def some_parts(
    features: Features, sequences: list[list[int]], step: int = 1
) -> tuple[list[Part], list[Array]]:
    """Return parts with sequences of these numbers of tokens; each array has its own checksum."""
    parts, shapes = [], PartShapes(features)
    for place, sizes in enumerate(sequences):
        tokens, squares = sum(sizes), sum(size**2 for size in sizes)
        more = [place % 3] * (2 * features.views)
        counts = Counts.of_flat([len(sizes), tokens, squares, 5 * tokens, *more])
        arrays = {}
        for n, (name, shape) in enumerate(shapes.of(counts).items()):
            fingerprint = digest(np.array([n])) if place % 2 else None
            arrays[name] = Entry(*shape, digest(np.array([place, n])), fingerprint)
        parts.append(Part(place * step, counts, arrays))
    return parts, [np.array(sizes, length_dtype(features)) for sizes in sequences]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 64), min_size=1, max_size=4), min_size=1, max_size=30),
    st.integers(1, 9),
    st.sampled_from([1, 7, 1001]),
)
def test_what_goes_in_comes_out(sequences: list[list[int]], page: int, step: int) -> None:
    features = features_of(views=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teachonce.store.format.index, "PAGE", page)
        parts, lengths = some_parts(features, sequences, step)
        got = Reading(parts, lengths, features).parts()
    got.check()
    assert list(got) == parts and got[-1] == parts[-1] and got[1:3] == parts[1:3]
    assert got.numbers.tolist() == [part.number for part in parts]
    whole = np.concatenate(lengths)
    for low in range(len(whole)):
        for high in range(low, len(whole) + 1):
            assert got.lengths[low:high].tolist() == whole[low:high].tolist()
    attributes = {"features": features.to_json()}
    manifests = [Manifest(attributes, {}, each) for each in (parts, got)]
    assert manifests[0].content() == manifests[1].content()
    assert manifests[0].totals == got.totals and manifests[0].first.tolist() == got.first.tolist()


def test_opening_reads_no_page_and_a_part_reads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachonce.store.format.index, "PAGE", 2)
    reading = Reading(*some_parts(SMALL, [[3, 4]] * 100), SMALL)
    parts = reading.parts()
    assert reading.names == ["index/first"]
    assert parts[41].number == 41 and parts[40].number == 40
    pages = [f"index/20/{key}" for key in ("counts", "sha256", "zarr_json")]
    assert reading.names == ["index/first", *pages]
    assert len(list(parts)) == 100 and len(parts._pages) == CACHED_PAGES


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no object": (lambda m: m.clear(), "number and page must be positive integers"),
    "no parts": (lambda m: m.update(number=0), "number and page"),
    "half a page": (lambda m: m.update(page=1.5), "number and page"),
    "more parts": (lambda m: m.update(number=8), "first is int64\\[8\\], expected int64\\[9\\]"),
    "smaller pages": (lambda m: m.update(page=2), "its arrays do not match its pages"),
    "a billion pages": (lambda m: m.update(number=10**9, page=1), "do not match its pages"),
    "other columns": (lambda m: m["columns"].reverse(), "its columns are not the arrays"),
    "no arrays": (lambda m: m.update(arrays=[]), "lists no arrays"),
    "a path": (lambda m: m["arrays"].update({"../a": m["arrays"]["first"]}), "do not match its"),
    "no entry": (lambda m: m["arrays"].update(first=7), "first: the manifest's entry is not valid"),
    "no counts": (lambda m: m.update(counts=7), "counts must be a JSON object"),
    "other counts": (lambda m: m["counts"].update(sequences=3), "not end at the number of seq"),
    "other totals": (lambda m: m["counts"].update(tokens=3), "do not sum to the counts of"),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the process to 256 MB of extra memory, which a forgery could otherwise exceed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_index_is_refused(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachonce.store.format.index, "PAGE", 3)
    reading, (edit, message) = Reading(*some_parts(SMALL, [[3, 4]] * 7), SMALL), FORGED[forgery]
    edit(reading.listed)
    with pytest.raises(StoreError, match=message) as caught:
        reading.parts().check()
    assert "damaged" in str(caught.value) and "\n" not in str(caught.value)


def test_more_sequences_than_memory_are_damage() -> None:
    reading = Reading(*some_parts(SMALL, [[3, 4]]), SMALL)
    reading.arrays["index/first"][-1] = 2**60
    reading.listed["arrays"]["first"] = Entry.of(reading.arrays["index/first"], None).to_json()
    reading.listed["counts"] = {**reading.listed["counts"], "sequences": 2**60}
    lengths = IndexedLengths(reading.parts())
    with pytest.raises(StoreError, match="sequences do not fit into memory; .*damaged"):
        lengths[:2]


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("first", 2, 2, "first does not ascend from 0"),
        ("0/counts", (1, 0), 0, "part numbers of page 0 do not ascend"),
        ("1/counts", (0, 0), 1, "part numbers do not ascend"),
        ("0/counts", (1, 0), -1, "part numbers of page 0 do not ascend"),
        ("0/counts", (1, 2), -1, "counts of page 0 are out of range"),
        ("2/counts", (0, 1), 3, "counts of page 2 do not agree with first"),
    ],
)
def test_forged_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, row: Any, value: int, message: str
) -> None:
    monkeypatch.setattr(teachonce.store.format.index, "PAGE", 3)
    reading = Reading(*some_parts(SMALL, [[3, 4]] * 7), SMALL)
    reading.arrays[f"index/{name}"][row] = value
    reading.listed["arrays"][name] = Entry.of(reading.arrays[f"index/{name}"], None).to_json()
    with pytest.raises(StoreError, match=message):
        reading.parts().check()
