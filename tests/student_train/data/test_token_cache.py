"""A store's text in the student's tokens is cached between students."""

from __future__ import annotations

import multiprocessing
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data import token_cache
from teachonce.student_train.data.student_tokens import ARRAYS, tokenize
from teachonce.student_train.data.token_cache import token_table
from teachonce.support.arrays import Array
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEACHONCE_CACHE", str(tmp_path))
    return tmp_path / "tokens"


def fresh(kind: str, make_tokenizer: Tokenizers, length: int = 16) -> Tokenizer:
    tokenizer: Tokenizer = make_tokenizer(kind).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_table_holds_what_the_tokenizer_gives(
    store: FeatureStore, make_tokenizer: Tokenizers, cache: Path, kind: str
) -> None:
    tokenizer = fresh(kind, make_tokenizer)
    table = token_table(store, tokenizer)
    for index in (np.arange(len(store)), np.array([5, 0, 5, len(store) - 1]), np.array([3])):
        got = table.of(index)
        want = tokenize(tokenizer, [store[int(i)].text for i in index])
        for name in ("ids", "offsets", "special", "start"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_made_once_for_a_text_a_vocabulary_and_a_length(
    store: FeatureStore, make_tokenizer: Tokenizers, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_table(store, fresh("wordpiece", make_tokenizer))
    (first,) = cache.iterdir()
    monkeypatch.setattr(token_cache, "_write", None)  # no further file is written
    token_table(open_store(store.path), fresh("wordpiece", make_tokenizer))
    monkeypatch.undo()
    monkeypatch.setenv("TEACHONCE_CACHE", str(cache.parent))
    token_table(store, fresh("wordpiece", make_tokenizer, 12))
    token_table(store, fresh("unigram", make_tokenizer))
    assert len(list(cache.iterdir())) == 3 and first.exists()


def test_a_user_without_a_home(
    store: FeatureStore, make_tokenizer: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no entry in /etc/passwd."""

    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("TEACHONCE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    table = token_table(store, fresh("wordpiece", make_tokenizer))
    assert table.folder is None and len(table.start) == len(store) + 1


def shorten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def garble(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")  # not UTF-8


@pytest.mark.parametrize("damage", [shorten, flip, garble, Path.unlink])
@pytest.mark.parametrize("name", ["ids", "start", "sha256"])
def test_a_damaged_table_is_made_anew(
    store: FeatureStore,
    make_tokenizer: Tokenizers,
    cache: Path,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    tokenizer, index = fresh("wordpiece", make_tokenizer), np.arange(len(store))
    want = token_table(store, tokenizer).of(index)
    (folder,) = cache.iterdir()
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    damage(folder / name)
    got = token_table(store, tokenizer).of(index)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.offsets, want.offsets)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == sound


def test_another_text_has_another_table(
    store: FeatureStore,
    make_tokenizer: Tokenizers,
    cache: Path,
    tmp_path: Path,
    tiny_teacher: Teachers,
) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Quite another text.\n", encoding="utf-8")
    out = dumped(tiny_teacher("bert"), text, tmp_path / "other.zarr")
    tokenizer = fresh("wordpiece", make_tokenizer)
    token_table(store, tokenizer)
    table = token_table(open_store(out), tokenizer)
    assert len(table.start) == 2 and len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    store: FeatureStore, make_tokenizer: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TEACHONCE_CACHE", str(blocked))
    tokenizer = fresh("wordpiece", make_tokenizer)
    got = token_table(store, tokenizer).of(np.array([1]))
    np.testing.assert_array_equal(got.ids, tokenize(tokenizer, [store[1].text]).ids)


def _make(path: str, kind: str, gate: Any, make_tokenizer: Tokenizers) -> None:
    gate.wait()
    token_table(open_store(path), fresh(kind, make_tokenizer))


def test_several_at_once(store: FeatureStore, make_tokenizer: Tokenizers, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    arguments = (str(store.path), "wordpiece", gate, make_tokenizer)
    makers = [context.Process(target=_make, args=arguments) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("name", ["ids", "begin", "special", "start"])
def test_a_forged_table_is_made_anew(
    store: FeatureStore, make_tokenizer: Tokenizers, cache: Path, name: str
) -> None:
    """A user who can write the cache can also fit its checksum."""
    tokenizer = fresh("wordpiece", make_tokenizer)
    token_table(store, tokenizer)
    (folder,) = cache.iterdir()
    before = (folder / name).read_bytes()
    values: Array = np.frombuffer(before, ARRAYS[name]).copy()
    values[:] = ~values if values.dtype == bool else values[::-1] + 1
    (folder / name).write_bytes(values.tobytes())
    (folder / token_cache.DIGEST).write_text(token_cache._digest(folder))
    token_table(store, tokenizer)
    assert (folder / name).read_bytes() == before
    (folder / name).write_bytes(before[:-1])  # not a whole number of values, or a missing value
    (folder / token_cache.DIGEST).write_text(token_cache._digest(folder))
    token_table(store, tokenizer)
    assert (folder / name).read_bytes() == before
