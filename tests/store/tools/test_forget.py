"""Documents are removed from a store permanently, whatever it contains and whenever it stops."""

import gzip
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.feature_store import arguments
from teachonce.store import Features, PartWriter, StoreError, UserError, open_store
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.format.identity import count_numbers, format_runs, parse_runs
from teachonce.store.format.layout import part_arrays
from teachonce.store.read.stored_tokenizer import within_bounds
from teachonce.store.tools import document_hashes
from teachonce.store.tools.copy import selected, take_part
from teachonce.store.tools.document_hashes import document_texts
from teachonce.store.tools.forget import FORGETTING, forget
from teachonce.store.tools.verify import verify
from teachonce.support import files
from teachonce.support.arrays import Array
from tests.making.stores import (
    IDENTITY,
    SMALL,
    TOKENIZER,
    Copy,
    begin,
    calibration_of,
    features_of,
    make_part,
    make_store,
    put_part,
    stores_in,
    unfinished,
)
from tests.store.containers.test_untrusted import edit_root
from tests.store.dying import Killed, dies_at
from tests.store.tools import forgetting
from tests.store.tools.forgetting import facts, holding, wants
from tests.store.tools.test_commands import refused, run

ROOT = Path(__file__).parents[3]
GONE = (1, 4)  # sequences 2, 3, 8 and 9 of each part
EVERY = [
    ("zarr", "topk"), ("h5", "sample"), ("h5", "tagging"),
    ("h5", "head"), ("zarr", "classification"), ("h5", "embedding"), ("h5", "pairs"),
]  # fmt: skip
QUICK = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Make smaller stores than other tests: each test here reads a whole store several times."""
    return stores_in(tmp_path_factory.mktemp("smaller"), parts=2)


EITHER = pytest.mark.parametrize(
    "store", ("zarr", pytest.param("h5", marks=pytest.mark.apart)), indirect=True
)


def kept_of(path: Path, gone: tuple[int, ...] = GONE) -> list[dict[str, object]]:
    with open_store(path) as store:
        places = [i for i in range(len(store)) if store[i].document not in gone]
        return [facts(store, i) for i in places]


def texts_of(path: Path, gone: tuple[int, ...] = ()) -> list[str]:
    with open_store(path) as store:
        return [record.text for record in store if record.document not in gone]


def a_text(path: Path, gone: tuple[int, ...] = GONE) -> str:
    """Return the longest text that will be forgotten."""
    with open_store(path) as store:
        return max((r.text for r in store if r.document in gone), key=len)


def check_forgotten(path: Path, kept: list[dict[str, object]], text: str) -> None:
    with open_store(path) as store:
        assert [facts(store, i) for i in range(len(store))] == kept
        assert store.identity["corpus"] == {"hash": "c", "forgotten": "1,4"}
    assert verify(path).problems == verify(path).unknown == []
    assert holding(path.parent, text) == []
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("ext", "tier"),
    [
        pytest.param(*kind, marks=() if n < QUICK else pytest.mark.apart)
        for n, kind in enumerate(EVERY)
    ],
)
def test_what_is_left_is_what_it_was(copy: Copy, ext: str, tier: str) -> None:
    path = copy(ext, "small" if tier == "embedding" else "default", tier)
    kept, text = kept_of(path), a_text(path)
    assert len(text) > 30 and holding(path.parent, text)
    forgetting.run(path, *GONE)
    check_forgotten(path, kept, text)


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_link_to_a_store(copy: Copy, tmp_path_factory: pytest.TempPathFactory, ext: str) -> None:
    """Documents are removed from the store to which a link leads, and the link remains."""
    path, link = copy(ext), tmp_path_factory.mktemp("links") / f"link.{ext}"
    link.symlink_to(path)
    kept, text = kept_of(path), a_text(path)
    forgetting.run(link, *GONE)
    check_forgotten(path, kept, text)
    assert link.is_symlink() and list(link.parent.iterdir()) == [link]


def test_parts_of_forgotten_documents_alone_go(tmp_path: Path) -> None:
    """A part without remaining documents is deleted; numbers of parts and documents keep gaps."""
    for path in (tmp_path / "a.zarr", tmp_path / "b.h5"):
        writer = begin(path, SMALL)
        for number in range(3):
            part = make_part(SMALL, number)
            part.document = np.full(12, 10 * number)
            put_part(writer, number, part)
        writer.seal()
        forgetting.run(path, 10)
        with open_store(path) as store:
            assert [part.number for part in store.manifest.parts] == [0, 2]
            assert {record.document for record in store} == {0, 20}
        assert verify(path).problems == []
        forgetting.run(path, 10)  # again: no work is left
        forgetting.run(path, 20)
        with open_store(path) as store:
            assert store.identity["corpus"]["forgotten"] == "10,20"
        assert count_numbers(parse_runs("10,20")) == 2


@given(st.lists(st.booleans(), min_size=12, max_size=12).filter(any), st.sampled_from(EVERY))
@settings(max_examples=25)
def test_selected_sequences(keep: list[bool], kind: tuple[str, str]) -> None:
    """Two selections in turn equal one selection of both; the arrays fit the counts."""
    features = features_of("small", kind[1])
    arrays = arrays_of(features)
    counts, some = selected(arrays, features, np.array(keep))
    shapes = {
        name: (spec.shape, spec.dtype) for name, spec in part_arrays(features, counts).items()
    }
    assert {name: (array.shape, array.dtype) for name, array in some.items()} == shapes
    _, every = selected(arrays, features, np.ones(12, bool))
    assert all(np.array_equal(every[name], arrays[name]) for name in arrays)
    inner = np.arange(sum(keep)) % 2 == 0
    if inner.any():
        outer = np.array(keep)
        outer[np.flatnonzero(outer)[~inner]] = False
        _, twice = selected(some, features, inner)
        _, once = selected(arrays, features, outer)
        assert all(np.array_equal(once[name], twice[name]) for name in arrays)


@cache
def arrays_of(features: Features) -> dict[str, Array]:
    """Return the arrays of a part as stored."""
    taken: dict[str, Array] = {}
    writer: Any = SimpleNamespace(
        features=features,
        part=lambda number, lengths: PartWriter(features, calibration_of(features), lengths),
        publish=lambda part: taken.update(part.take()[1]),
    )
    put_part(writer, 0, make_part(features, 5))
    return taken


def test_runs() -> None:
    assert format_runs([(5, 5), (1, 3), (4, 4), (9, 12), (10, 11)]) == "1-5,9-12"
    assert parse_runs("1-5,9-12") == [(1, 5), (9, 12)] and parse_runs("") == parse_runs(None) == []
    assert parse_runs("x,1-y,7") == [(7, 7)]
    assert parse_runs(f"{5000 * '9'},1-{5000 * '9'},7") == [(7, 7)]


@EITHER
def test_killed_at_every_rename(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any rename, the store is old, new, or refused by readers; the repeated
    command completes the new one."""
    kept, text, old, left = kept_of(store), a_text(store), texts_of(store), texts_of(store, GONE)
    states, stops = set[str](), 0
    for step in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(files, "rename", dies_at(1 + stops % 5, done=bool(step % 2)))
            try:
                forgetting.run(store, *GONE)
                break
            except Killed:
                stops += 1
        try:
            found = texts_of(store)
            states.add("old" if found == old else "new")
            assert found in (old, left)
        except StoreError as error:
            states.add("half")
            assert "is not finished" in str(error) and "`feature-store forget`" in str(error)
    assert stops > 3 and ("half" in states) == store.is_dir()
    forgetting.run(store, *GONE)
    check_forgotten(store, kept, text)


@EITHER
@pytest.mark.parametrize(
    "delays",
    [
        pytest.param((0.0, 0.02), marks=pytest.mark.slow),
        pytest.param(tuple(number * 0.004 for number in range(40)), marks=pytest.mark.apart),
    ],
    ids=["twice", "often"],
)
def test_killed(store: Path, delays: tuple[float, ...]) -> None:
    kept, text, old, left = kept_of(store), a_text(store), texts_of(store), texts_of(store, GONE)
    script = (
        "import sys; from pathlib import Path; from tests.store.tools import forgetting;"
        "print('ready', flush=True); sys.stdin.readline();"
        "forgetting.run(Path(sys.argv[1]), *map(int, sys.argv[2:]))"
    )
    for delay in delays:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(store), *map(str, GONE)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stdin.close()
        try:
            assert texts_of(store) in (old, left)
        except StoreError as error:
            assert "is not finished" in str(error)
    forgetting.run(store, *GONE)
    check_forgotten(store, kept, text)


class Counted(str):
    """A text that counts the characters to which it is appended."""

    copied = 0

    def __radd__(self, other: str) -> str:
        Counted.copied += len(other)
        return other + str(self)


def test_windows_are_joined_without_copying_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, whole = [(3, "abcdef"), (3, ""), (5, "gh"), (2, "ijkl"), (9, "mn")], "abc"
    for place, text in windows:
        whole = whole[:place] + text
    pieces = [(7, place, Counted(text)) for place, text in [(0, "abc"), *windows]]
    monkeypatch.setattr(document_hashes, "_pieces", lambda store: [*pieces, (8, 0, "b")])
    store: Any = SimpleNamespace(features=SMALL)
    assert dict(document_texts(store)) == {7: whole, 8: "b"} and Counted.copied == 0


@pytest.fixture
def half(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a store whose process was killed while it forgot document 1."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(files, "rename", dies_at(5, done=True))
        forgetting.run(store, 1)
    return store


def test_another_wish_after_a_kill(half: Path) -> None:
    """After a kill, a command with other documents finishes the old work, then forgets these
    too."""
    with pytest.raises(StoreError, match="is not finished"):
        open_store(half)
    forgetting.run(half, 4)
    with open_store(half) as store:
        assert {record.document for record in store} == {0, 2, 3, 5}
        assert store.identity["corpus"]["forgotten"] == "1,4"


def test_nothing_else_goes_on_with_a_half_forgotten_store(half: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other arguments: the corpus \(forgotten\)"):
        begin(half, SMALL)
    assert "is not finished" in refused("convert", half, tmp_path / "b.zarr")
    assert "has not yet read its corpus" in refused("seal", half)
    assert "`feature-store forget` with the same documents" in run("repair", half).output
    forgetting.run(half, 1)
    assert verify(half).problems == []


def test_a_forged_journal_is_refused(half: Path) -> None:
    journal = json.loads((half / "zarr.json").read_text())["attributes"][FORGETTING]
    for key, value in (("documents", math.inf), ("gone", [math.inf])):
        edit_root(half, **{FORGETTING: journal | {key: value}})
        with pytest.raises(StoreError, match=f"its attribute {FORGETTING} is not valid; restore"):
            forgetting.run(half, 1)


def test_the_list_of_the_command(store: Path, tmp_path: Path) -> None:
    """A list names documents by number or text hash; unknown entries are refused unless allowed."""
    path, file = store, tmp_path / "list"
    with open_store(path) as opened:
        texts = dict(document_texts(opened))  # the numbers repeat in each part
    before = kept_of(path, ())
    file.write_text(f"77\n\n{hashlib.sha256(b'no such').hexdigest()}\n1\n")
    line = refused("forget", path, "--documents", file)
    assert (
        "cannot forget 2 documents that the store does not have (" in line
        and "line 1: number 77" in line
    )
    assert "nothing was changed" in line and "--missing-ok" in line
    assert kept_of(path, ()) == before
    of_five = hashlib.sha256(texts[5].encode()).hexdigest()
    file.write_text(f"77\n1\n{of_five.upper()}\n", "utf-8-sig")  # as Windows writes it
    result = run("forget", path, "--documents", file, "--missing-ok")
    assert result.exit_code == 0, result.output
    assert f"not in the store: {file}, line 1: number 77" in result.output
    assert f"{path}: forgot 2 documents with 12 sequences" in result.output
    assert kept_of(path, ()) == [fact for fact in before if fact["document"] not in (1, 5)]
    file.write_text("1\n5\n")
    assert "forgot 0 documents" in run("forget", path, "--documents", file).output
    for text, words in (
        ("hello world\n", "line 1: 'hello world'; expected the number of a document"),
        (5000 * "7" + "\n", f"line 1: '{40 * '7'}'; expected the number of a document"),
        ("\n", "lists no document"),
        ("0\n2\n3\n4\n", "the request names all documents"),
    ):
        file.write_text(text)
        assert words in refused("forget", path, "--documents", file)
    assert "name the documents" in refused("forget", path)
    line = refused("forget", path, "--documents", file, "--text-column", "text")
    assert "--text-column text: applies only to --texts" in line
    assert "copy the store there with `feature-store convert`" in refused(
        "forget", "s3://bucket/a.zarr", "--documents", file
    )


def test_time_for_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a tokenizer depends on the bytes of the texts: in a folder, in files of a
    pattern, or compressed."""
    seen = list[int]()

    def recorded(data: bytes, text_bytes: int, *rest: Any) -> Any:
        seen.append(text_bytes)
        return within_bounds(data, text_bytes, *rest)

    monkeypatch.setattr(arguments, "within_bounds", recorded)
    texts = [tmp_path / "texts" / name for name in ("a.txt", "inner/b.txt")]
    texts[1].parent.mkdir(parents=True)
    for text in texts:
        text.write_text("the story of 東京\n" * 9, "utf-8")
    path = tmp_path / "a.zarr"
    identity = IDENTITY | {"arguments": {"stride": 0}}
    settings = {"tokenizer.json": TOKENIZER, "config.json": b"{}", "tokenizer_config.json": b"{}"}
    make_store(path, SMALL, parts=1, identity=identity, files=settings)
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(texts[0].read_bytes()))
    words = (tmp_path / "texts", f"{tmp_path}/*/*.txt", packed)
    line = refused("forget", path, *(word for each in words for word in ("--texts", each)))
    assert "cannot forget 1 document that the store" in line  # the texts are equal
    assert seen == [4 * 9 * len("the story of 東京".encode())]


def test_refused_where_the_text_would_stay(store: Path, tmp_path: Path) -> None:
    """`forget` is refused for a damaged store, and next to a quarantine folder of `repair`."""
    damaged = store / "parts/1/text/utf8/c/0"
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"123456789")
    before = damaged.read_bytes()
    with pytest.raises(StoreError, match="parts/1/text/utf8: .*cannot be decoded"):
        forgetting.run(store, *GONE)
    assert damaged.read_bytes() == before and not list(store.glob("parts/*.kept"))
    run("repair", store)
    make_store(store, SMALL)
    with pytest.raises(UserError, match=r"a.zarr.aside-1: holds what `feature-store repair`"):
        forgetting.run(store, *GONE)
    unfinished(tmp_path / "begun.zarr", SMALL, 0)
    with pytest.raises(StoreError, match="is not finished"):
        forgetting.run(tmp_path / "begun.zarr", *GONE)


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_counts_of_words_go(tmp_path: Path, ext: str) -> None:
    """Word counts are removed, since a counted word may occur in no remaining text."""
    path = tmp_path / "one" / f"a.{ext}"
    path.parent.mkdir()
    words = WordCounts({"Rumpelstilzchen": 3, "the": 9})
    make_store(path, SMALL, extras=(words,))
    assert holding(path.parent, "Rumpelstilzchen")
    forgetting.run(path, 1)
    assert not holding(path.parent, "Rumpelstilzchen")
    with open_store(path) as store:
        assert WordCounts.stored(store) is None
    assert verify(path).problems == verify(path).unknown == []


def test_parts_that_another_store_shares(copy: Copy, tmp_path: Path) -> None:
    """If two stores share files of parts, `forget` in one leaves the other unchanged."""
    path, other = copy("zarr"), tmp_path / "other.zarr"
    with open_store(path) as store:
        writer = begin(other, store.features)
        for number in range(2):
            keep = np.arange(12) > 3 if number == 1 else None
            take_part(writer, number, store, number, keep)
        writer.seal()
    name = "text/utf8/c/0"
    shared = [os.stat(other / f"parts/{number}/{name}").st_nlink for number in range(2)]
    assert shared == [2, 1]
    before, text = kept_of(path, ()), a_text(other, (2,))
    assert kept_of(other, ()) == before[:12] + before[16:]
    done = forget(other, "", lambda store: wants(2))
    assert done.shared == 1 and done.sequences == 4
    assert verify(other).problems == verify(path).problems == []
    assert not holding(other, text) and kept_of(path, ()) == before


def test_a_hard_link_to_a_file_is_reported(copy: Copy) -> None:
    path = copy("h5")
    os.link(path, path.with_name("other.h5"))
    done = forget(path, "", lambda store: wants(*GONE))
    assert done.shared > 0 and "copy by hard links" in [*done.lines("")][-1]
