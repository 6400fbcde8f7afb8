"""The values written to a store come back, by record, batch and stream, in both formats.

- The values written to a store come back, by record and by stream, in both formats.
- Batches of any sequences of a store.
- A cached array equals the stored one, is read once, and takes the memory of its rows alone.
"""

import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import teachonce.store.read.part
from teachonce.store import Record, StoreError, open_store
from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.store.format.codecs.levels import LEVELS
from teachonce.store.read.part import CachedSlices
from teachonce.store.read.record import View
from teachonce.support.arrays import Array, starts
from tests.making.stores import Part, calibration_of, channel_scale, features_of, make_store
from tests.store.containers.shard_files import both, random_values, write

EXT = ("zarr", "h5")
COMBINATIONS = [
    ("exact", "topk"), ("default", "topk"), ("small", "topk"),
    ("exact", "head"), ("small", "head"), ("default", "sample"),
    ("default", "classification"), ("small", "tagging"), ("small", "next-topk"),
    ("exact", "next-sample"), ("default", "chat"), ("default", "ranked-topk"),
]  # fmt: skip


def expected_hidden(part: Part, codec: str, key: tuple[int, str], rows: slice) -> Array:
    states = part.hidden[key][rows]
    if codec == "exact":
        return states
    mean, deviation = np.linspace(-1, 1, 37, dtype="f"), channel_scale(37).astype("f")
    stored = LEVELS[codec][0].hidden.encode(states, mean, deviation)
    values = LEVELS[codec][0].hidden.codec.decode(stored, (37,))
    decoded: Array = values * deviation + mean
    return decoded


def test_a_store_is_a_sequence(made: Callable[..., Any]) -> None:
    fs = open_store(made("zarr")[0])
    assert [record.index for record in fs[1:9:3]] == [1, 4, 7]
    assert [record.index for record in fs[34:99]] == [34, 35] and fs[40:] == []
    assert fs[-1].index == 35 and fs[np.int64(2)].index == 2
    for outside in (36, -37):
        with pytest.raises(IndexError, match=rf"no sequence {outside}; it has 36, numbered from 0"):
            fs[outside]
    others: list[Any] = [True, np.True_, 2.7, "text", None, [1, 2], np.array([1, 2])]
    for wrong in others:
        with pytest.raises(TypeError, match=r"expected an integer or a slice.*, got .*to_datasets"):
            fs[wrong]
    assert_type(fs[3], Record)
    assert_type(fs[:3], list[Record])
    assert_type(fs[3].views[0], View)
    with pytest.raises(IndexError, match="view 7: the store has 2 views, numbered from 0"):
        fs[3].views[7]


def test_a_notebook_shows_a_store_and_a_record(made: Callable[..., Any]) -> None:
    fs = open_store(made("zarr", "default", "classification")[0])
    shown = fs._repr_html_()
    assert "<tr><th>size</th><td>36 sequences, " in shown and "classification: " in shown
    record = fs[3]
    shown, (begin, end) = record._repr_html_(), record.offsets[1]
    row = f"<td>{record.token_ids[1]}</td><td>{begin}-{end}</td></tr>"
    assert f"<tr><td>{escape(record.text[begin:end])}</td>{row}" in shown
    assert f"<caption>sequence 3 of document {record.document}: " in shown
    assert shown.count("<tr>") <= 18 and len(shown) < 4000


def test_a_store_describes_what_it_holds_and_closes_after_a_block(made: Callable[..., Any]) -> None:
    path, _ = made("zarr", "default")
    with open_store(path) as fs:
        printed = repr(fs)
        assert printed.startswith(f"<FeatureStore {path}: {len(fs):,} sequences, ")
        assert "mean" in printed and printed.endswith(" views>")
        batch = next(iter(fs.stream(0, 0, 512)))
        assert repr(batch) == f"<Batch: {len(batch)} sequences, {batch.start[-1]} teacher tokens>"
        assert repr(batch.hidden["mean"]) == f"<HiddenBatch: {batch.start[-1]} teacher tokens x 37>"
        shown = (batch.hidden, batch.attention, batch.logits, fs[3].views, fs[3].views[0].logits)
        assert max(len(repr(each)) for each in shown) < 200


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize(("codec", "tier"), COMBINATIONS)
def test_records(made: Callable[..., Any], ext: str, codec: str, tier: str) -> None:
    path, parts = made(ext, codec, tier)
    fs = open_store(path)
    assert len(fs) == 36 == len(list(fs.texts()))
    for index in (0, 17, 35):
        record, part, s = fs[index], parts[index // 12], index % 12
        start = starts(part.token_counts)
        rows = slice(int(start[s]), int(start[s + 1]))
        assert record.text == part.texts[s]
        assert record.document == s // 2 and record.document_begin == 7 and not record.hard_cut
        assert (record.token_ids == part.token_ids[rows]).all()
        assert (record.offsets == part.offsets[rows]).all()
        assert (record.special == part.special[rows]).all()
        for number, view in enumerate(record.views):
            assert not (view.mask & record.special).any()
            if number:
                assert (view.spans == part.spans[number][s]).all()
            else:
                assert not view.mask.any()
            for name in ("mean", "groups2.1"):
                wanted = expected_hidden(part, codec, (number, name), rows)
                assert np.allclose(view.hidden[name], wanted, atol=1e-5)
            attention = part.attention[number, "mean"][s]
            step = {"exact": 0, "default": 1, "small": 5}[codec]
            bound = step * np.sqrt(attention) / 255 + step**2 * 4e-6
            assert (np.abs(view.attention["mean"] - attention) <= bound).all()
            if fs.features.logits:
                check_logits(view.logits, part.logits[number], rows, codec)
            else:
                check_task(record, view, part, number, s, rows)


def check_task(record: Any, view: Any, part: Part, number: int, sequence: int, rows: slice) -> None:
    """Check that the values of one task are as written, and the other task's are missing."""
    tagging = record.features.task.kind == "tagging"
    here = rows if tagging else sequence
    assert part.gold is not None
    gold, logits = part.gold[here], part.task[number][here]
    if tagging:
        assert (record.tags == gold).all() and record.tags.dtype == np.int32
        assert record.label is None and (view.tag_logits == logits).all()
    else:
        assert record.label == (None if gold < 0 else gold) and record.tags is None
        assert (view.class_logits == logits).all() and view.class_logits.dtype == np.float32
    for name in ("logits", "class_logits" if tagging else "tag_logits"):
        with pytest.raises(StoreError, match="no .*logits"):
            getattr(view, name)


def check_logits(read: Any, put: dict[str, Array], rows: slice, codec: str) -> None:
    assert (read.log_partition == put["log_partition"][rows]).all()
    assert (read.observed is None) == ("observed" not in put)
    if read.observed is not None:
        expected, bound = put["observed"][rows], 0 if codec == "exact" else 2**-11
        assert read.observed[-1] == -np.inf and (read.observed[:-1] <= 0).all()
        assert np.abs(read.observed[:-1] - expected[:-1]).max(initial=0) <= bound
    if read.tier == "topk":
        assert (read.ids == put["ids"][rows]).all()
        bound = {"exact": 0, "default": 2**-11, "small": 0.3}[codec]
        assert np.abs(read.logprobs - put["logprobs"][rows]).max() <= bound
        assert np.abs(read.rest - put["rest"][rows]).max() <= min(bound, 2**-11)
    elif read.tier == "sample":
        for token, draws in enumerate(put["draws"][rows]):
            ids, counts = np.unique(draws, return_counts=True)
            held = slice(read.start[token], read.start[token + 1])
            assert (read.ids[held] == ids).all() and (read.counts[held] == counts).all()
    else:
        bound = {"exact": 0, "small": 0.03}[codec]
        assert np.abs(read.values - put["values"][rows]).max() <= bound


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize(("codec", "tier"), COMBINATIONS)
def test_stream_gives_what_records_give(
    made: Callable[..., Any], ext: str, codec: str, tier: str
) -> None:
    fs, seen = open_store(made(ext, codec, tier)[0]), []
    blocks = fs.blocks(100)
    for batch in fs.stream(3, 1, 150, view=1, blocks=blocks, pool_blocks=4):
        seen += batch.index.tolist()
        assert len(batch) == 1 or np.diff(batch.start).max() * len(batch) <= 150
        squares = starts(np.diff(batch.start) ** 2)
        for place, index in enumerate(batch.index.tolist()):
            record = fs[index]
            view, rows = record.views[1], slice(*batch.start[place : place + 2])
            assert batch.texts[place] == record.text and batch.document[place] == record.document
            for name in ("token_ids", "offsets", "special"):
                assert (getattr(batch, name)[rows] == getattr(record, name)).all()
            assert (batch.mask[rows] == view.mask).all()
            spans = slice(*batch.spans_start[place : place + 2])
            assert (batch.spans[spans] == view.spans).all()
            for name in fs.features.hidden:
                states = batch.hidden[name].states()[rows]
                assert np.allclose(states, view.hidden[name], atol=1e-5)
                mean, deviation = fs.calibration[name]
                normalised = batch.hidden[name].normalised()[rows]
                assert np.allclose(normalised * deviation + mean, states, atol=1e-4)
            held = batch.attention["mean"][squares[place] : squares[place + 1]]
            assert (held == view.attention["mean"].reshape(-1)).all()
            if tier == "chat":
                assert batch.learnt is not None and record.learn is not None
                learnt = record.learn & (np.arange(len(record.learn)) >= record.context)
                assert (batch.learnt[rows] == learnt).all() and record.context < len(learnt)
                assert batch.messages is None  # for a masked view
            else:
                assert batch.learnt is None and record.learn is None and record.context == 0
            if fs.features.logits:
                compare_logits(batch.logits, view.logits, rows)
                assert batch.labels is batch.tags is batch.class_logits is batch.tag_logits is None
            elif tier == "tagging":
                assert batch.tags is not None and batch.tag_logits is not None
                assert (batch.tags[rows] == record.tags).all()
                assert (batch.tag_logits[rows] == view.tag_logits).all()
                assert batch.labels is batch.class_logits is None
            else:
                label = -1 if record.label is None else record.label
                assert batch.labels is not None and batch.class_logits is not None
                assert batch.labels[place] == label and len(batch.labels) == len(batch)
                assert (batch.class_logits[place] == view.class_logits).all()
                assert batch.tags is batch.tag_logits is None
    assert sorted(seen) == list(range(len(fs)))


def test_a_stream_gives_the_messages_of_chats(made: Callable[..., Any]) -> None:
    fs = open_store(made("zarr", "default", "chat")[0])
    for batch in fs.stream(3, 1, 150):
        assert batch.messages is not None and not len(batch.spans) and not batch.mask.any()
        for place, index in enumerate(batch.index.tolist()):
            rows = slice(*batch.messages[0][place : place + 2])
            record = fs[index]
            assert np.array_equal(batch.messages[1][rows], record.messages)
            assert not len(record.views[0].spans)


def compare_logits(batch: Any, record: Any, rows: slice) -> None:
    assert (batch.log_partition[rows] == record.log_partition).all()
    assert (batch.observed is None) == (record.observed is None)
    assert record.observed is None or (batch.observed[rows] == record.observed).all()
    if batch.tier == "sample":
        edges = batch.start[rows.start : rows.stop + 1]
        assert (edges - edges[0] == record.start).all() and batch.draws == record.draws
        held = slice(edges[0], edges[-1])
        assert (batch.ids[held] == record.ids).all() and (batch.counts[held] == record.counts).all()
    for name in {"topk": ("ids", "logprobs", "rest"), "head": ("values",)}.get(batch.tier, ()):
        assert (getattr(batch, name)[rows] == getattr(record, name)).all()


def order_of(fs: Any, **arguments: Any) -> list[list[int]]:
    return [batch.index.tolist() for batch in fs.stream(batch_tokens=120, **arguments)]


def test_stream_order_skip_and_subset(made: Callable[..., Any]) -> None:
    zarr, h5 = (open_store(made(ext)[0]) for ext in EXT)
    assert (zarr.blocks(60) == h5.blocks(60)).all()
    blocks = zarr.blocks(60)
    whole = order_of(zarr, seed=1, blocks=blocks, pool_blocks=5)
    assert whole == order_of(h5, seed=1, blocks=blocks, pool_blocks=5)
    assert whole != order_of(h5, seed=2, blocks=blocks, pool_blocks=5)
    assert whole != order_of(h5, seed=1, epoch=1, blocks=blocks, pool_blocks=5)
    for skip in (1, 7, len(whole), len(whole) + 5):
        assert order_of(h5, seed=1, blocks=blocks, pool_blocks=5, skip=skip) == whole[skip:]
    for pool_blocks in (1, 5):
        held = order_of(h5, seed=1, blocks=blocks, pool_blocks=pool_blocks)
        count = h5.batch_count(1, 0, 120, blocks=blocks, pool_blocks=pool_blocks)
        assert count == len(held)
    plain = order_of(h5, shuffle=False)
    assert sum(plain, []) == list(range(36))
    some = order_of(h5, blocks=blocks[[2, 0]], shuffle=False)
    assert sum(some, []) == [i for row in (2, 0) for i in range(*blocks[row])]
    batch = next(h5.stream(features="hidden"))
    assert batch.logits is None and not batch.attention and len(batch.hidden) == 2
    task = open_store(made("h5", "default", "classification")[0])
    batch = next(task.stream(features=("hidden",)))
    assert batch.class_logits is None and batch.labels is not None
    assert len(batch.labels) == len(batch)


@pytest.mark.parametrize("ext", EXT)
def test_streams_do_not_disturb_one_another(made: Callable[..., Any], ext: str) -> None:
    fs = open_store(made(ext)[0])

    def content(batch: Any) -> bytes:
        arrays = [batch.hidden["mean"].values, batch.logits.ids, batch.attention["mean"]]
        return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)

    def first() -> Any:
        return next(fs.stream(seed=1, batch_tokens=300))

    alone = [content(batch) for batch in fs.stream(seed=2, batch_tokens=150, pool_blocks=1)]
    held = first()
    expected = content(held)
    one, other = (fs.stream(seed=2, batch_tokens=150, pool_blocks=1) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert content(a) == content(b) == alone.pop(0)
    assert content(held) == expected == content(first())
    assert held.texts == first().texts and 1 <= len(fs._streamer._spare) <= 3
    fs.close()
    assert not fs._streamer._spare


def test_damage_ahead_stops_no_batch_before_it(copy: Callable[..., Path]) -> None:
    path = copy("zarr")
    (path / "parts/2/token/id/c/0").unlink()
    batches, seen = open_store(path).stream(shuffle=False, pool_blocks=1, batch_tokens=10**6), []
    with pytest.raises(StoreError, match="part.*2.*token/id.* is missing"):
        for batch in batches:
            seen += batch.index.tolist()
    assert seen == list(range(24))


def test_skip_reads_no_features(made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fs, opened = open_store(made("h5")[0]), []
    real = teachonce.store.read.part.PartReader.array

    def spy(self: Any, name: str) -> Any:
        opened.append(name)
        return real(self, name)

    monkeypatch.setattr(teachonce.store.read.part.PartReader, "array", spy)
    assert list(fs.stream(skip=10**6)) == []
    assert opened == []  # the manifest has the lengths
    next(fs.stream(features=("hidden",)))
    read = {name.split("/")[0] for name in opened}
    assert read == {"sequence", "token", "view0"} and "view0/logits/ids" not in opened


def test_a_record_reads_its_own_rows_only(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, rows = open_store(made("zarr")[0]), []
    real = teachonce.store.read.part.PartReader.read

    def spy(self: Any, name: str, begin: int, end: int) -> Any:
        rows.append((name, end - begin))
        return real(self, name, begin, end)

    record = fs[5]
    monkeypatch.setattr(teachonce.store.read.part.PartReader, "read", spy)
    record.views[0].hidden["mean"]
    tokens = len(record.token_ids)
    assert rows[:2] == [(f"view0/hidden/mean/{key}", tokens) for key in ("values", "scale")]


@pytest.mark.parametrize("ext", EXT)
def test_what_lies_outside_the_parts(made: Callable[..., Any], ext: str) -> None:
    fs = open_store(made(ext, "exact", "head")[0])
    assert fs.teacher_file("config.json") == b"{}"
    assert (fs.teacher_weights()["embeddings.word_embeddings.weight"] == np.eye(8, 4)).all()
    assert fs.teacher_weights()["pooler.bias"].dtype == np.float16
    weight, bias = fs.head()
    assert weight.shape == (1000, 20) and bias.shape == (1000,)
    for name, pair in calibration_of(fs.features).items():
        assert all((a == b).all() for a, b in zip(pair, fs.calibration[name], strict=True))
    assert fs.meta["tokens"] == sum(int(part.token_counts.sum()) for part in made(ext)[1])
    assert fs.meta["state"] == "sealed" and fs.identity["teacher"]["id"] == "tiny"
    with pytest.raises(StoreError, match="it has: config.json, tokenizer.json"):
        fs.teacher_file("../zarr.json")
    with pytest.raises(StoreError, match=r"no hidden state 'layer9' .* it has: mean, groups2.1"):
        fs[0].views[0].hidden["layer9"]
    with pytest.raises(KeyError):
        fs[0].views[0].attention["none"]


def test_tokenizer_from_the_store(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    make_store(tmp_path / "a.h5", features_of(tier=None), parts=1, files=files)
    fs = open_store(tmp_path / "a.h5")
    assert fs.tokenizer().encode("cat").ids == [1]
    with pytest.raises(StoreError, match="no logits"):
        fs[0].views[0].logits  # noqa: B018
    with pytest.raises(StoreError, match="no LM head"):
        fs.head()


def test_a_store_gives_any_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    make_store(path, features_of("default", "embedding"))
    fs = open_store(path)
    wanted = fs.embeddings()
    numbers = [np.array([30, 2, 17]), np.array([5]), np.array([35, 0])]
    for batch, asked in zip(fs.gather(numbers), numbers, strict=True):
        vectors = batch.embedding
        assert np.array_equal(batch.index, asked) and vectors is not None
        assert np.array_equal(vectors, wanted[asked])
        assert batch.texts == [fs[int(i)].text for i in asked]
        states = [fs[int(i)].views[0].hidden["mean"] for i in asked]
        assert np.allclose(batch.hidden["mean"].states(), np.concatenate(states), atol=1e-5)
    for wrong, got in (
        ([3, 36], "3..36"),
        ([], r"float64\[0\]"),
        ([1.7, 2], r"float64\[2\]"),
        (np.arange(36) > 9, r"bool\[36\]"),
    ):
        with pytest.raises(StoreError, match=f"numbers in 0..35; got {got}"):
            next(fs.gather([wrong]))


@pytest.mark.parametrize("read", ["stream", "gather"])
def test_unknown_arguments_are_refused_at_once(made: Callable[..., Any], read: str) -> None:
    fs = open_store(made("zarr")[0])
    start = partial(fs.gather, [[1]]) if read == "gather" else fs.stream
    for wrong, printed in (
        ({"features": "hiden"}, "features must be among hidden, .*, got ..hiden"),
        ({"view": 2}, "no view 2; it has 0..1"),
        ({"view": -1}, "no view -1; it has 0..1"),
    ):
        with pytest.raises(StoreError, match=f"{fs.path}: {printed}"):
            start(**wrong)
    numbers = {"batch_texts": 0, "batch_tokens": 0, "every": 0, "skip": -1}
    for below in (numbers, {"batch_tokens": 99.5, "epoch": 1.0, "seed": None}):
        for name, number in below.items():
            words: dict[str, Any] = {name: number}
            with pytest.raises(StoreError, match="every must be whole numbers over 0; skip, seed"):
                fs.stream(**words)


LENGTH = 101_001  # with rows of one byte, as in maps


@pytest.fixture(scope="module")
def values() -> Array:
    return random_values("uint8", (LENGTH,), 0, 200)


@pytest.fixture(scope="module")
def slices(values: Array, tmp_path_factory: pytest.TempPathFactory) -> ShardSlices:
    ours, _ = both(write(tmp_path_factory.mktemp("kept") / "a.zarr", values, 6000, []))
    assert isinstance(ours, ShardSlices)
    return ours


def test_threads_get_the_rows_and_read_none_twice(
    values: Array, slices: ShardSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, times = CachedSlices(slices), np.zeros(LENGTH, int)
    real = ShardSlices.read_into

    def slow(self: ShardSlices, begin: int, end: int, out: Any) -> None:
        times[begin:end] += 1
        time.sleep(0.001)
        real(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", slow)

    def right(number: int) -> bool:
        rng = np.random.default_rng(number % 20)  # several request the same rows
        begin = int(rng.integers(LENGTH // 2))
        end = begin + int(rng.integers(LENGTH // 4))
        view, out = kept.read(begin, end), np.empty(end - begin, np.uint8)
        kept.read_into(begin, end, out)
        return np.array_equal(view, values[begin:end]) and np.array_equal(out, view)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(right, range(60)))
    assert times.max() == 1 and times[0] == 0 == times[-1]
    np.testing.assert_array_equal(kept.read(LENGTH - 5, LENGTH + 5), values[-5:])
    np.testing.assert_array_equal(kept.read(0, LENGTH), values)
    assert times.min() == times.max() == 1 and not kept.read(7, 7).size


def test_the_room_that_it_takes(slices: ShardSlices) -> None:
    tracemalloc.start()
    try:
        kept = CachedSlices(slices)
        kept.read(0, LENGTH)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert LENGTH < taken < 1.1 * LENGTH


def test_the_disk_is_asked_for_what_is_not_there(
    slices: ShardSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = CachedSlices(slices), list[tuple[int, int]]()
    monkeypatch.setattr(ShardSlices, "prefetch", lambda _, *rows: asked.append(rows))
    kept.read(10, 20)
    kept.prefetch(10, 30)
    kept.prefetch(10, 9000)
    assert asked == [(10, 9000)]
