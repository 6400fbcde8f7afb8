"""Streams: their order, shares, batches and checks, in this process and in others.

- The order of a stream is a pure function of its blocks, seed and epoch.
- A share of a stream has exactly every N-th batch, and reads little else.
- Batches are planned from the sequence lengths in the manifest, without opening parts.
- A stream that checks its data ends at damage that only the manifest can detect.
- An open store can be passed to other processes: forked, or spawned with its address.
"""

import base64
import dataclasses
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import teachonce.store.write.tree
from harness import synthetic
from teachonce.store import Batch, FeatureStore, StoreError, open_store
from teachonce.store.containers.hdf5 import file as hdf5_file
from teachonce.store.containers.untrusted import Folder
from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.store.format.layout import Counts, PartShapes, part_arrays
from teachonce.store.read import stream_order
from teachonce.store.read.part_index import block_starts
from teachonce.store.tools.copy import upload
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array, permutation, starts
from tests.integrity.damage import flip_in
from tests.integrity.laundering import alter
from tests.making.stores import (
    SMALL,
    Copy,
    Made,
    begin,
    features_of,
    make_part,
    make_store,
    put_part,
    unfinished,
)
from tests.store.containers.test_untrusted import edit_manifest
from tests.store.tools.test_repair import EXT, contents

law = settings(max_examples=60, deadline=None)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=80).map(np.array)


@law
@given(lengths, st.integers(1, 120), st.integers(0, 5), st.integers(0, 3))
def test_batches_hold_each_sequence_once_within_the_budget(
    sizes: Array, budget: int, seed: int, epoch: int
) -> None:
    for batches in (
        stream_order.shuffled_batches(sizes, budget, seed, epoch, 0),
        stream_order.plain_batches(sizes, budget),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
        for batch in batches:
            assert len(batch) == 1 or sizes[batch].max() * len(batch) <= budget
    plain = stream_order.plain_batches(sizes, budget)
    assert np.concatenate(plain).tolist() == list(range(len(sizes)))


@law
@given(lengths, st.integers(1, 30), st.integers(0, 5))
def test_batches_counted_in_texts_are_full_but_for_one(sizes: Array, texts: int, seed: int) -> None:
    for batches in (
        stream_order.shuffled_batches(sizes, 1, seed, 0, 0, texts),
        stream_order.plain_batches(sizes, 1, texts),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
        counts = sorted(map(len, batches), reverse=True)
        assert counts[:-1] == [texts] * (len(counts) - 1) and 0 < counts[-1] <= texts


@law
@given(lengths, st.integers(1, 60), st.sets(st.integers(0, 200)))
def test_blocks_are_runs_of_about_their_size(sizes: Array, tokens: int, firsts: set[int]) -> None:
    start = starts(sizes)
    parts = np.array([0, *sorted(first for first in firsts if 0 < first < len(sizes))])
    begin = block_starts(sizes, parts, tokens)
    assert set(parts.tolist()) <= set(begin.tolist())
    for first, last in zip(parts, [*parts[1:], len(sizes)], strict=True):
        alone = block_starts(sizes[first:last], np.zeros(1, int), tokens)
        assert (alone + first).tolist() == [at for at in begin if first <= at < last]
    blocks = np.stack([begin, np.append(begin[1:], len(sizes))], axis=1)
    assert (blocks[:, 0] < blocks[:, 1]).all()
    assert blocks[0, 0] == 0 and blocks[-1, 1] == len(sizes)
    assert (blocks[1:, 0] == blocks[:-1, 1]).all()
    assert ((start[blocks[:, 1]] - start[blocks[:, 0]]) < tokens + sizes.max()).all()


@law
@given(st.lists(st.integers(0, 30), min_size=1, max_size=100), st.integers(0, 5))
def test_block_order_is_a_permutation_of_few_parts_at_a_time(parts: list[int], seed: int) -> None:
    numbers = np.array(sorted(parts))
    ordered = stream_order.order_blocks(numbers, seed, 0)
    assert sorted(ordered.tolist()) == list(range(len(parts)))
    groups = numbers[ordered]
    first = {part: int(np.flatnonzero(groups == part)[0]) for part in set(parts)}
    last = {part: int(np.flatnonzero(groups == part)[-1]) for part in set(parts)}
    for place in range(len(groups)):
        open_parts = sum(first[p] <= place <= last[p] for p in first)
        assert open_parts <= stream_order.PARTS_TOGETHER


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    parts = np.repeat(np.arange(10), 6)
    orders = {
        (s, e): stream_order.order_blocks(parts, s, e).tolist() for s in (0, 1) for e in (0, 1)
    }
    assert len({str(value) for value in orders.values()}) == 4
    assert orders[1, 1] == stream_order.order_blocks(parts, 1, 1).tolist()


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    """The order of a seed never changes. If this fails, stopped runs cannot be continued: do not
    change the numbers."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    parts = np.repeat(np.arange(3), 3)
    assert stream_order.order_blocks(parts, 7, 0).tolist() == BLOCKS


PERMUTATION = [5, 6, 3, 2, 1, 0, 4, 7]
BLOCKS = [5, 1, 2, 7, 6, 4, 0, 8, 3]


BATCH = 60
LENGTH, WIDTH = 200, 1024  # the states of a sequence are larger than a gap that is read through


def printed(batch: Batch) -> dict[str, Any]:
    """Return copies of all values of a batch."""
    logits = batch.logits
    return {
        **{name: values.copy() for name, values in batch.stored.items()},
        **{name: batch.attention[name].copy() for name in batch.attention},
        **{name: np.array(value) for name, value in vars(logits).items()},
        "index": batch.index,
        "document": batch.document,
        "spans": batch.spans,
        "spans_start": batch.spans_start,
        "texts": batch.texts,
    }  # fmt: skip


@pytest.mark.parametrize("grain", [1, 300])
@pytest.mark.parametrize(("ext", "tier"), [("zarr", "topk"), ("zarr", "sample"), ("h5", "topk")])
def test_the_shares_are_the_batches_of_the_whole(
    made: Made, ext: str, tier: str, grain: int
) -> None:
    with open_store(made(ext, tier=tier)[0]) as fs:
        order: dict[str, Any] = {"blocks": fs.blocks(30), "pool_blocks": 4, "view": 1}
        whole = [printed(batch) for batch in fs.stream(3, 1, BATCH, **order)]
        assert len(whole) > 8
        fs._index.grain = grain
        for first in range(3):
            wanted = whole[4 + first :: 3]
            some = fs.stream(3, 1, BATCH, **order, skip=4 + first, every=3)
            for want, batch in zip(wanted, map(printed, some), strict=True):
                assert want.keys() == batch.keys()
                for name, values in want.items():
                    np.testing.assert_array_equal(batch[name], values, err_msg=name)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "store.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "MEDIAN", LENGTH)
        patch.setattr(synthetic, "SPREAD", 0.1)
        synthetic.make_store(path, 8_000, synthetic.features_of(WIDTH, 4))
    return path


@pytest.mark.parametrize("every", [1, 2, 4])
def test_bytes_that_a_share_reads(wide: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    read, plain = [0], ShardSlices.read_into

    def counted(self: ShardSlices, begin: int, end: int, out: Array) -> None:
        read[0] += out.nbytes
        plain(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", counted)
    with open_store(wide) as fs:
        of_shares = []
        for first in range(every):
            read[0] = 0
            batches = fs.stream(batch_tokens=1024, skip=first, every=every)
            held = sum(array.nbytes for batch in batches for array in batch.stored.values())
            assert 0.99 * held <= read[0] < 1.35 * held
            of_shares.append(held)
        assert sum(of_shares) > (WIDTH + LENGTH) * fs.meta["tokens"]


def test_each_share_checks_parts_of_its_own(copy: Callable[..., Path]) -> None:
    path = copy("zarr")
    alter(path, "parts/1/token/id")

    def finds(first: int) -> bool:
        with open_store(path) as fs:
            try:
                for _ in fs.stream(batch_tokens=BATCH, skip=first, every=3, check=True):
                    pass
            except StoreError as error:
                assert "part 1: token/id does not match its checksum" in str(error)
                return True
            return False

    assert [finds(first) for first in range(3)] == [False, True, False]


FORGED = ["altered file manifest/zarr.json"]  # by `edit_manifest`, whatever the edit
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
def test_shapes_of_parts_match_their_arrays(
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


NAMES = (
    "view1/logits/logprobs", "view1/hidden/mean/values", "view1/attention/mean/values",
    "view1/mask/action", "token/id", "text/utf8",
)  # fmt: skip


@pytest.fixture(params=["zarr", "h5"])
def path(request: pytest.FixtureRequest, copy: Callable[..., Path]) -> Path:
    return copy(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_checks_names_the_array(path: Path, name: str) -> None:
    alter(path, f"parts/1/{name}")
    store = open_store(path)
    assert sum(len(batch) for batch in store.stream(view=1)) == len(store)
    with pytest.raises(StoreError, match=f"part 1: {name} does not match its checksum"):
        list(store.stream(view=1, check=True))
    store.close()


def test_each_array_is_checked_once(path: Path) -> None:
    store = open_store(path)
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    store.close()
    alter(path, "parts/0/view1/logits/logprobs")
    assert sum(len(batch) for batch in store.stream(view=1, check=True)) == len(store)
    with pytest.raises(StoreError, match="does not match"):
        list(open_store(path).stream(view=1, check=True))


def test_what_is_not_read_is_not_checked(path: Path) -> None:
    alter(path, "parts/0/view1/logits/logprobs")
    store = open_store(path)
    assert len(list(store.stream(view=0, check=True)))
    assert len(list(store.stream(view=1, features=["hidden"], check=True)))


def read_all(fs: FeatureStore, queue: Any) -> None:
    queue.put([batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_other_processes_read_the_same(made: Made, ext: str, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    fs = open_store(made(ext)[0])
    expected = [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)]
    queue = context.Queue()
    process = context.Process(target=read_all, args=(fs, queue))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0
    assert [batch.hidden["mean"].states().sum() for batch in fs.stream(seed=1)] == expected


def test_a_pickled_store_is_its_address(tmp_path: Path, made: Made) -> None:
    fs = open_store(made("zarr")[0])
    address = pickle.dumps(fs)
    assert len(address) < 1000
    again = pickle.loads(address)
    assert again.meta == fs.meta and again[7].text == fs[7].text

    unfinished(tmp_path / "a.h5", SMALL)
    part = open_store(tmp_path / "a.h5", allow_partial=True)
    assert len(pickle.loads(pickle.dumps(part))) == len(part) == 12

    upload(made("zarr")[0], "memory://kept/a.zarr")
    far = open_store("memory://kept/a.zarr", storage_options={"skip_instance_cache": True})
    again = pickle.loads(pickle.dumps(far))
    fsspec.filesystem("memory").rm("/kept", recursive=True)
    assert again.meta == fs.meta and again.source.options == {"skip_instance_cache": True}


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_closed_store_opens_again(made: Made, ext: str) -> None:
    fs = open_store(made(ext)[0])
    text, ids = fs[3].text, fs[3].token_ids
    fs.close()
    assert fs[3].text == text and (fs[3].token_ids == ids).all()


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_store_may_be_read_from_another_working_directory(
    made: Made, ext: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(ext)[0]
    monkeypatch.chdir(path.parent)
    expected = open_store(path.name)[7]
    fs = open_store(path.name)
    pickled = pickle.dumps(fs)
    (tmp_path / path.name).mkdir()  # the same name, but another folder
    monkeypatch.chdir(tmp_path)
    for store in (fs, pickle.loads(pickled), pickle.loads(pickle.dumps(fs))):
        assert store[7].text == expected.text
        assert (store[7].views[0].hidden["mean"] == expected.views[0].hidden["mean"]).all()
    assert str(fs.path) == path.name, "messages name the store as the user did"
    fs.to_parquet("table.parquet", columns="text")
    assert (path.parent / f".{path.name}.derived").exists()
