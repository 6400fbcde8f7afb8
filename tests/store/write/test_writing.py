"""Writing: parts, their queue, refusals, resuming, and equal bytes for equal input.

- Writing: refusals, resuming, and equal bytes for equal input.
- A part refuses values that it cannot store, and names the sequence.
- Parts wait in a queue next to the store; the holder of a part's lease makes it.
- A writer that is killed anywhere, any number of times, produces the same bytes at the end.
"""

import dataclasses
import errno
import hashlib
import shutil
import tempfile
import time
from collections.abc import Generator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from harness.processes import finish
from teachonce.store import (
    Features,
    LogitsSpec,
    PartWriter,
    Sequences,
    StoreError,
    StoreWriter,
    TaskSpec,
    open_store,
)
from teachonce.store.containers.hdf5.tree import Hdf5File
from teachonce.store.containers.memory_map import OpenFiles
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import OutsideParts
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import Taken
from tests.making.stores import (
    IDENTITY,
    SMALL,
    begin,
    calibration_of,
    features_of,
    make_part,
    make_store,
    put_part,
    unfinished,
)
from tests.store.dying import Killed, dies_at
from tests.store.write import killed
from tests.support.leased import Writer, held

EXT = ("zarr", "h5")


def contents(path: Path) -> dict[str, str]:
    """Return the digest of every file of a store, with `created` and its checksums blanked."""
    fs = open_store(path)
    fs.close()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    digests = {}
    for file in files:
        data = file.read_bytes().replace(fs.meta["created"].encode(), b"-" * 20)
        if file == path / "zarr.json":
            data = data.replace(fs.source.attributes()["checksum"].encode(), b"-" * 64)
        elif file == path:
            data = _blanked(file)
        digests[str(file.relative_to(path.parent))[len(path.name) :]] = hashlib.sha256(
            data
        ).hexdigest()
    fs.close()
    return digests


def _blanked(file: Path) -> bytes:
    """Blank an HDF5 file: a checksum covers the header with `created`, and a SHA-256 the file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(file, folder))
        with h5py.File(copy, "r+") as opened:
            for key in ("created", "checksum"):
                opened.attrs.modify(key, np.bytes_(b"-" * len(opened.attrs[key])))
        return copy.read_bytes()[: file.stat().st_size - 32]


@pytest.mark.parametrize("ext", EXT)
def test_a_resumed_store_equals_an_undisturbed_one(tmp_path: Path, ext: str) -> None:
    one, two = tmp_path / f"1.{ext}", tmp_path / f"2.{ext}"
    make_store(one, SMALL)
    parts = [make_part(SMALL, seed) for seed in range(3)]
    writer = begin(two, SMALL)
    put_part(writer, 2, parts[2], seed=5)
    half = writer.part(0, parts[0].token_counts)
    half.put_hidden(0, "mean", [0], parts[0].hidden[0, "mean"][:1])
    assert StoreWriter.peek(two)["identity"] == IDENTITY  # type: ignore[index]
    writer.close()
    writer = begin(two, SMALL, calibration={}, weights=None, files={})
    assert writer.published == {2}
    put_part(writer, 1, parts[1])
    put_part(writer, 0, parts[0], seed=9)
    writer.seal()
    assert contents(one) == contents(two)
    assert {*tmp_path.iterdir()} == {one, two}
    assert StoreWriter.peek(two) is None


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    assert StoreWriter.peek(path) is None
    writer = begin(path, SMALL)
    part = make_part(SMALL, 0)
    put_part(writer, 3, part)
    with pytest.raises(StoreError, match=r"is not finished .*with open_store.*partial=True"):
        open_store(path)
    fs = open_store(path, allow_partial=True)
    assert len(fs) == 12 and fs[3].text == part.texts[3] and fs.meta["state"] == "writing"
    stored = StoreWriter.calibration(path)
    assert stored and (stored["mean"][1] == fs.calibration["mean"][1]).all()
    with pytest.raises(StoreError, match="part 3 is published already"):
        writer.part(3, [4])
    fs.close()
    writer.seal()
    with pytest.raises(UserError, match="exists already"):
        begin(path, SMALL)
    assert len(open_store(path)) == 12


def test_an_unfinished_store_without_a_part(tmp_path: Path) -> None:
    unfinished(tmp_path / "a.zarr", features_of(tier="embedding"), parts=0)
    fs = open_store(tmp_path / "a.zarr", allow_partial=True)
    assert fs.embeddings().shape == (0, 33) and fs.blocks().shape == (0, 2)
    assert [*fs.stream(), *fs.texts(), *fs.table().batches()] == []
    assert fs.to_parquet(tmp_path / "rows") == [] and fs.batch_count() == 0


@pytest.mark.parametrize("ext", EXT)
def test_other_arguments_are_named(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    begin(path, SMALL)
    other = IDENTITY | {"teacher": IDENTITY["teacher"] | {"revision": "2"}}
    with pytest.raises(UserError, match=r"the model \(revision\) is 1 in the store and 2"):
        begin(path, SMALL, identity=other)
    with pytest.raises(UserError, match=r"--max-length is 64 .* 32 now"):
        begin(path, dataclasses.replace(SMALL, max_length=32))


def test_taken_names_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("mine")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "c.zarr").write_text("mine")
    (tmp_path / "d.h5").mkdir()
    for name in ("a.h5", "b.zarr", "c.zarr", "d.h5"):
        with pytest.raises(UserError, match="not a feature store.*nothing was changed"):
            begin(tmp_path / name, SMALL)
    assert (tmp_path / "a.h5").read_text() == (tmp_path / "c.zarr").read_text() == "mine"
    with pytest.raises(UserError, match=r"must end in .zarr .* or .h5"):
        begin(tmp_path / "a.npz", SMALL)
    with pytest.raises(UserError, match="local path"):
        begin("http://127.0.0.1:9/a.zarr", SMALL)
    with pytest.raises(UserError, match="does not exist; make it"):
        begin(tmp_path / "no" / "a.zarr", SMALL)
    with pytest.raises(UserError, match="a.h5 is a file; give a path in a folder"):
        begin(tmp_path / "a.h5" / "a.zarr", SMALL)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_store_started_with_an_earlier_form_of_the_codec(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    begin(path, dataclasses.replace(features_of("small"), form=1)).close()
    for codec, views in (("small", 2), ("default", 2), ("small", 3)):
        with pytest.raises(UserError, match="with other arguments: .*in the store and .* now"):
            begin(path, features_of(codec, views=views))
    begin(path, dataclasses.replace(features_of("small"), form=1)).close()


@pytest.mark.parametrize("ext", EXT)
def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(tmp_path / f"a.{ext}", SMALL)
    put_part(writer, 0, make_part(SMALL, 0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("sync", "sync_tree"):
            patch.setattr(files, name, full)
        patch.setattr("teachonce.store.containers.zarr.tree.sync_tree", full)
        with pytest.raises(StoreError, match="cannot write part 1 of .*No space left.*run the"):
            put_part(writer, 1, make_part(SMALL, 1))
    put_part(writer, 1, make_part(SMALL, 1))
    writer.seal()
    assert len(open_store(tmp_path / f"a.{ext}")) == 24


def test_weights_that_nobody_takes_any_more_end_in_silence() -> None:
    """Abandoned weights (full disk) raise nothing if another context closes their generator."""
    weights = {"a": np.ones(3, np.float32), "b": np.full(3, 1e9, np.float32)}
    arrays, before = OutsideParts(weights=weights).arrays(Features(width=4)), np.geterr()
    assert isinstance(arrays, Generator)
    assert next(arrays)[0] == "teacher/weights/a"
    assert np.geterr() == before
    copy_context().run(arrays.close)


def test_more_parts_than_a_process_may_have_files(tmp_path: Path) -> None:
    writer, part = begin(tmp_path / "a.h5", SMALL), make_part(SMALL, 0, sequences=1)
    for number in range(9):
        put_part(writer, number, part)
    fs = open_store(tmp_path / "a.h5", allow_partial=True)
    source: Any = fs.source
    source._files = OpenFiles[Hdf5File](3)
    for _ in range(2):
        assert [record.text for record in fs] == part.texts * 9
        assert [len(fs.part(place).all("token/id")) for place in range(9)]
        assert len(source._files) <= 3
    fs.close()
    writer.seal()
    assert len(open_store(tmp_path / "a.h5")) == 9


def test_nothing_to_seal(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no part was published"):
        begin(tmp_path / "a.h5", SMALL).seal()


@pytest.mark.parametrize("ext", EXT)
def test_a_big_identity(tmp_path: Path, ext: str) -> None:
    """A large identity is stored in HDF5, whose headers hold only small attributes (64 KiB)."""
    identity = IDENTITY | {"labels": [f"étiquette {n}" for n in range(20_000)]}
    make_store(tmp_path / f"a.{ext}", SMALL, parts=1, identity=identity)
    assert open_store(tmp_path / f"a.{ext}").identity == identity


def put_one(features: Features = SMALL) -> tuple[Any, Any]:
    part, calibration = make_part(features, 0), calibration_of(features)
    return PartWriter(features, calibration, part.token_counts, 4, "x.zarr: part 4"), part


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, r"part 4, sequence 2, token 1: view0/hidden/mean is NaN or infinite"),
        (np.inf, r"sequence 2, token 1: .* NaN or infinite"),
        (3e38, r"sequence 2, token 1: .* is too large: its squares sum to infinity"),
        (1e17, r"sequence 2, token 1: .* deviations away"),
    ],
)
def test_unusable_states_name_the_sequence(bad: float, message: str) -> None:
    writer, part = put_one()
    rows = np.arange(len(part.token_ids))
    states = part.hidden[0, "mean"].copy()
    states[writer.token_start[2] + 1, 5] = bad
    with pytest.raises(StoreError, match=message):
        writer.put_hidden(0, "mean", rows, states)


def test_rows_are_put_exactly_once() -> None:
    writer, part = put_one()
    states = part.hidden[0, "mean"]
    writer.put_hidden(0, "mean", [3, 1], states[[3, 1]])
    for rows in ([1], [4, 4]):
        with pytest.raises(StoreError, match="written twice"):
            writer.put_hidden(0, "mean", rows, states[rows])
    with pytest.raises(StoreError, match="must lie in 0"):
        writer.put_hidden(0, "mean", [10**6], states[:1])
    with pytest.raises(StoreError, match=r"has shape \[2, 37\], expected \[1, 37\]"):
        writer.put_hidden(0, "mean", [9], states[:2])
    with pytest.raises(StoreError, match="no view0/hidden/max; it has"):
        writer.put_hidden(0, "max", [9], states[:1])
    with pytest.raises(StoreError, match="not written: view0/hidden/mean, view0/logits, sequences"):
        writer.take()


def test_unusable_logits_are_refused() -> None:
    writer, part = put_one()
    put = {name: array[:1].copy() for name, array in part.logits[0].items()}
    for key, value, message in (
        ("ids", 1000, "outside the vocabulary"),
        ("ids", -1, "outside the vocabulary"),
        ("logprobs", 0.5, "not a log-probability"),
        ("rest", np.nan, "not a log-probability"),
        ("log_partition", np.inf, "NaN or infinite"),
        ("log_partition", 1e38, "is too large: its squares sum to infinity in float32"),
    ):
        fresh, bad = put_one()[0], {name: array.copy() for name, array in put.items()}
        bad[key].reshape(-1)[0] = value
        with pytest.raises(StoreError, match=f"sequence 0, token 0: .*{message}"):
            fresh.put_logits(0, [0], bad)
    names = "ids, logprobs, rest, log_partition"
    for other in ({"values": np.ones((1, 4)), "log_partition": [1]}, {**put, "observed": [-1.0]}):
        with pytest.raises(StoreError, match=f"has {', '.join(other)}, expected {names}$"):
            put_one()[0].put_logits(0, [0], other)
    plain = PartWriter(Features(hidden=("mean",), width=37), calibration_of(SMALL), [3])
    with pytest.raises(StoreError, match="no view0/logits; it has view0/hidden/mean"):
        plain.put_logits(0, [0], put)


def test_the_log_probability_of_the_token_that_follows() -> None:
    features = features_of(tier="next-sample", views=1)
    part = make_part(features, 0)
    logits = part.logits[0]
    writer = PartWriter(features, calibration_of(features), part.token_counts)
    rows = np.arange(len(part.token_ids))
    with pytest.raises(StoreError, match="token 0: view0/logits/observed is not a log-prob"):
        writer.put_logits(0, rows, logits | {"observed": np.full(len(rows), 0.5)})
    writer = PartWriter(features, calibration_of(features), part.token_counts)
    # Zeros also where no next token exists.
    writer.put_logits(0, rows, logits | {"observed": np.zeros(len(rows))})
    stored = writer._arrays["view0/logits/observed"]
    assert (stored[writer.token_start[1:] - 1] == 65535).all() and (stored == 0).sum() == len(
        rows
    ) - len(part.texts)


GOOD: dict[str, Any] = {
    "texts": ["ab"], "document": [0], "document_begin": [0], "hard_cut": [False],
    "token_ids": [2, 50, 3], "offsets": [(0, 0), (0, 2), (0, 0)], "special": [1, 0, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["\ud800x"]}, "sequence 0: the text has half of a surrogate pair"),
        ({"token_ids": [2, 5000, 3]}, "sequence 0, token 1: token id outside the vocabulary"),
        ({"offsets": [(0, 0), (0, 9), (0, 0)]}, "token 1: offsets outside the text"),
        ({"offsets": [(0, 0), (0, 2), (1, 2)]}, "token 2: special token with offsets"),
        ({"document": [1, 2]}, r"document has shape \[2\], expected \[1\]"),
    ],
)
def test_bad_sequences_are_refused(change: dict[str, Any], message: str) -> None:
    features = Features(max_length=9, vocabulary=100)
    writer = PartWriter(features, {}, [3])
    writer.set_sequences(Sequences(**GOOD))
    with pytest.raises(StoreError, match=message):
        writer.set_sequences(Sequences(**(GOOD | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": [3]}, "a count of tokens for each of 1 sequences, at least 0"),
        ({"context": [-1]}, "a count of tokens for each of 1 sequences"),
        ({"learn": [True]}, r"learn has shape \[1\], expected \[3\]"),
        ({"messages": [[[0, 2, 7]]]}, "messages must be ascending .* the role 0, 1, .*, 6, 255"),
        ({"messages": [[[2, 1, 0]]]}, "messages must be ascending spans begin <= end"),
        ({"messages": [[], []]}, "messages of 2 sequences, expected 1"),
    ],
)
def test_bad_marks_of_tokens_are_refused(change: dict[str, Any], message: str) -> None:
    features = Features(max_length=9, vocabulary=100, context=True, learn=True, messages=True)
    stored = PartWriter(features, {}, [3]).set_sequences(Sequences(**GOOD))
    assert stored["sequence/context"].tolist() == [0] and stored["token/learn"].all()
    with pytest.raises(StoreError, match=message):
        PartWriter(features, {}, [3]).set_sequences(Sequences(**(GOOD | change)))
    plain = PartWriter(Features(max_length=9, vocabulary=100), {}, [3])
    with pytest.raises(StoreError, match="this store has no"):
        plain.set_sequences(Sequences(**(GOOD | change)))
    with pytest.raises(StoreError, match="learn must be true or absent"):
        Features.from_json(features.to_json() | {"learn": 1})


def test_unusable_labels_and_logits_of_a_task_are_refused() -> None:
    features = features_of(tier="classification")
    part = make_part(features, 0)
    arguments = (part.texts, part.document, part.document, part.document > 9)
    tokens = (part.token_ids, part.offsets, part.special)
    for kind, gold, message in (
        ("classification", [4] * 12, r"sequence 0: gold label 4, expected -1 \(none\) or 0..3"),
        ("classification", [0] * 11, r"shape \[11\], expected \[12\]"),
        ("tagging", part.special.astype(int), "sequence 0: gold label 1, .* -1 for special tokens"),
        (None, [0] * 12, "has no task"),
    ):
        writer = PartWriter(features_of(tier=kind), calibration_of(features), part.token_counts)
        with pytest.raises(StoreError, match=message):
            writer.set_sequences(Sequences(*arguments, *tokens, gold))
        if kind is None:
            with pytest.raises(StoreError, match="has no task"):
                writer.put_task(0, [0], np.zeros((1, 4)))
        elif kind == "classification":
            writer.set_sequences(Sequences(*arguments, *tokens))  # without gold: -1
            with pytest.raises(StoreError, match="sequence 2, token 0: view1/classes is NaN"):
                writer.put_task(1, [2], np.full((1, 4), np.nan))
            with pytest.raises(StoreError, match=r"shape \[1, 3\], expected \[1, 4\]"):
                writer.put_task(0, [2], np.zeros((1, 3)))


def test_features_of_a_task_in_json() -> None:
    features = features_of(tier="tagging")
    assert Features.from_json(features.to_json()) == features
    plain = features_of().to_json()
    with pytest.raises(StoreError, match="lack codec"):
        Features.from_json({key: value for key, value in plain.items() if key != "codec"})
    assert "task" not in plain and set(plain["logits"]) == {"tier", "size"}
    causal = Features(vocabulary=9, logits=LogitsSpec("topk", 3, next_token=True))
    assert causal.to_json()["logits"] == {"tier": "topk", "size": 3, "next_token": True}
    assert Features.from_json(causal.to_json()) == causal
    followed = dataclasses.replace(causal, logits=LogitsSpec("topk", 3, True, observed=True))
    assert Features.from_json(followed.to_json()) == followed != causal
    for wrong in (("topk", 3, False, True), ("head", 3, True, True)):
        with pytest.raises(StoreError, match="observed belongs to"):
            LogitsSpec(*wrong)
    capped = LogitsSpec("head", 3, True, cap=30.0)
    assert LogitsSpec.from_json(capped.to_json()) == capped
    assert np.allclose(capped.capped(np.array([3.0, -300.0])), [2.9900, -30], atol=1e-4)
    for cap in (0, -1.0, np.inf, np.nan, True, "30", 10**400, 1e300, 1e-300):
        with pytest.raises(StoreError, match="cap of logits must be a number"):
            LogitsSpec.from_json({"tier": "head", "size": 3, "cap": cap})
    with pytest.raises(StoreError, match="cap of logits .* got 3.0 with tier topk"):
        LogitsSpec("topk", 3, True, cap=3.0)
    with pytest.raises(StoreError, match="observed must be true or absent"):
        LogitsSpec.from_json({"tier": "topk", "size": 3, "next_token": True, "observed": 1})
    good: dict[str, Any] = {"kind": "tagging", "labels": ["a"]}
    later = TaskSpec.from_json(good | {"later_label": "a"})
    assert later.later_number == 0 and later.to_json() == good | {"later_label": "a"}
    assert TaskSpec.from_json(good).to_json() == good
    bad_tasks: tuple[Any, ...] = (
        None, [], {}, {"kind": "tagging"}, good | {"kind": "parsing"}, good | {"kind": {}},
        good | {"labels": []}, good | {"labels": "ab"}, good | {"labels": ["a", "a"]},
        good | {"labels": ["a", 1]}, good | {"labels": {"a": 1}},
        good | {"labels": [*map(str, range(2**16 - 1)), "0"]},  # refused quickly
        good | {"later_label": "b"}, good | {"later_label": 0},
        good | {"kind": "classification", "later_label": "a"},
    )  # fmt: skip
    for bad in bad_tasks:
        with pytest.raises(StoreError, match="^features: "):
            Features.from_json(plain | {"task": bad})
    for more in ({"next_token": False}, {"next_token": 1}, {"more": 1}):
        with pytest.raises(StoreError, match="^features: "):
            Features.from_json(plain | {"logits": {"tier": "topk", "size": 3} | more})


def test_bad_counts_masks_and_features() -> None:
    features = Features(max_length=9, vocabulary=100, views=2)
    for counts, message in (([], "at least one"), ([3, 10], "sequence 1: 10"), ([0], "0 tokens")):
        with pytest.raises(StoreError, match=message):
            PartWriter(features, {}, counts)
    writer = PartWriter(features, {}, [3])
    offsets = [(0, 1), (1, 2), (2, 4)]
    writer.set_sequences(Sequences(["abcd"], [0], [0], [0], [1, 2, 3], offsets, [0, 0, 0]))
    for spans in (
        [(2, 3, 0), (0, 1, 0)],
        [(0, 2, 0), (1, 3, 0)],
        [(0, 9, 0)],
        [(0, 1, 3)],
        [(1, 1, 0)],
    ):
        with pytest.raises(StoreError, match="sequence 0: masked words must be ascending"):
            writer.set_masks(1, [spans])
    with pytest.raises(StoreError, match="masks of view 1"):
        writer.take()
    writer.set_masks(1, [[(0, 2, 0)]])
    assert writer.take()[0].spans == (0, 1)
    with pytest.raises(StoreError, match="published twice"):
        writer.take()
    for bad in (
        {"hidden": ("../x",)}, {"hidden": ("a", "a")}, {"codec": "zip"}, {"views": 0},
        {"width": True}, {"vocabulary": 2, "logits": LogitsSpec("topk", 3)}, {"attention": ("/",)},
    ):  # fmt: skip
        with pytest.raises(StoreError, match="features|name in a store"):
            Features(**bad)
    with pytest.raises(StoreError, match="tier must be one of"):
        LogitsSpec("all", 3)


def test_numbers_beyond_a_codec_are_reported_as_such() -> None:
    features = features_of(tier="head")
    writer, part = put_one(features)
    put = {name: array[:1].copy() for name, array in part.logits[0].items()}
    for value, message in (
        (7e4, "over 6.55e.04, the largest number .*--codec exact"),
        (np.inf, "infinite"),
    ):
        put["values"][:] = value
        writer, _ = put_one(features)
        with pytest.raises(StoreError, match=message):
            writer.put_logits(0, [0], put)


def filled(folder: Path, parts: int = 6) -> PartQueue:
    queue = PartQueue(folder / "a.zarr")
    queue.begin()
    for number in range(parts):
        queue.put(number, b"%d" % number, "mark")
    return queue


def test_own_parts_come_first(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    taken = [queue.take(1, 3) for _ in range(6)]
    assert [part.number for part in taken if part] == [1, 4, 0, 2, 3, 5]
    assert all(part and part.data == b"%d" % part.number for part in taken)
    assert queue.take(1, 3) is None and queue.leased() == set(range(6))
    queue.drop(4)
    queue.close()
    assert queue.numbers() == {0, 1, 2, 3, 5} and queue.leased() == set()


def test_a_part_in_other_hands_is_left_alone(tmp_path: Path) -> None:
    queue = filled(tmp_path, 2)
    with held(queue.folder / "0") as process:
        part = queue.take()
        assert part and part.number == 1 and queue.take() is None
        with pytest.raises(Taken, match=f"process {process.pid} on"):
            queue.check_idle()
        process.kill()
        finish(process)
        queue.check_idle()
        part = queue.take()
        assert part and part.number == 0
    queue.close()


def test_the_end_is_reported_once_it_is_known(tmp_path: Path) -> None:
    queue = filled(tmp_path, 1)
    assert queue.ended() is None
    queue.end({"parts": 1, "tokens": 5}, "mark")
    assert queue.ended() == {"parts": 1, "tokens": 5} and queue.numbers() == {0}
    (queue.folder / "end.json").write_text("{")
    assert queue.ended() is None
    queue.remove()
    queue.remove()
    assert not queue.folder.exists() and queue.numbers() == set() and queue.take() is None


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("ext", ["zarr", pytest.param("h5", marks=pytest.mark.apart)])
def test_killed_while_sealing(tmp_path: Path, ext: str) -> None:
    """A writer killed while it seals leaves a store that can be opened, unfinished or finished."""
    whole, broken = tmp_path / f"whole.{ext}", tmp_path / f"broken.{ext}"
    killed.main(whole)
    states: list[str] = []
    for delay in (0, 0.003, 0.01, 0.03):
        with Writer(broken) as writer:
            if writer.answer() != "done":  # finished at last, before the kill
                break
            for number in range(killed.PARTS if not states else 0):
                assert writer.request(number) == "done"
            writer.say("seal")
            time.sleep(delay)
            writer.process.kill()
        fs = open_store(broken, allow_partial=True)
        states.append(fs.meta["state"])
        assert len(fs.manifest.parts) == killed.PARTS
        fs.close()
    killed.main(broken)
    assert "writing" in states
    assert contents(whole) == contents(broken)
    assert {*tmp_path.iterdir()} == {whole, broken}


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_killed_at_every_rename(tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / f"whole.{ext}", tmp_path / f"broken.{ext}"
    killed.main(whole)
    stops = 0
    for step in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(files, "rename", dies_at(1 + step % 2, done=bool(step % 2)))
            try:
                killed.main(broken)
                break
            except Killed:
                stops += 1
    killed.main(broken)
    assert stops > killed.PARTS // 2
    assert contents(whole) == contents(broken)
    assert {*tmp_path.iterdir()} == {whole, broken}
