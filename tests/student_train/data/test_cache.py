"""Training from a store in memory, and from cached tokens.

- Training from a store in memory equals training from disk, and a store that does not fit is
  refused.
- A store's text in the student's tokens is cached between students.
"""

import gc
import multiprocessing
import os
import pwd
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from teachonce.store import FeatureStore, open_store
from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.store.format.codecs.built_in import (
    Coarse,
    Fixed,
    Float16,
    Float32,
    Int4,
    Int8,
    Root,
    Square,
)
from teachonce.store.format.codecs.codec import Codec
from teachonce.store.format.layout import part_arrays
from teachonce.store.read.part import CachedSlices
from teachonce.store.tools.copy import convert
from teachonce.student_train.cli import main
from teachonce.student_train.data import cache, token_cache
from teachonce.student_train.data.student_tokens import ARRAYS, tokenize
from teachonce.student_train.data.token_cache import token_table
from teachonce.student_train.plan.checks import check_memory, checked_plan
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import train
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.end_to_end.support import refused, says
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.student_train.support import options_for, stop

CPU = torch.device("cpu")
LOSSES = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0, "cosine": 1.0, "sentence": 1.0, "attention": 1.0}


@pytest.fixture(scope="module")
def small(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Convert the store to four bits, in HDF5."""
    out = tmp_path_factory.mktemp("cache") / "small.h5"
    convert(store.path, out, codec="small")
    return str(out)


options_of = partial(options_for, batch_tokens=1024, steps=10, loss=LOSSES, held_out=0.1)


def losses_of(
    store: FeatureStore, options: TrainOptions, out: Path | None = None, resume: bool = False
) -> list[dict[str, float]]:
    student, collator, _ = prepare(options, store)
    found: list[dict[str, float]] = []
    done = train(store, student, collator, options, out, resume=resume,
                 on_step=lambda _, each: found.append(each))  # fmt: skip
    return [*found, done.validation]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["small", pytest.param("default", marks=pytest.mark.apart)])
def test_every_cache_gives_the_same_losses(
    store: FeatureStore, small: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table stays on the device, where the next training needs the memory."""
    stored = small if codec == "small" else store.path
    source, tables = open_store(stored), list[weakref.ref[torch.Tensor]]()
    real = cache.ResidentFeatures._load_table

    def watched(self: cache.ResidentFeatures, path: str) -> torch.Tensor:
        table = real(self, path)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(cache.ResidentFeatures, "_load_table", watched)
    found = []
    for kind in ("device", "ram", "none"):
        gc.disable()
        try:
            found.append(losses_of(source, options_of(source, cache=kind)))
            assert tables and not any(table() is not None for table in tables)
        finally:
            gc.enable()
        kept = isinstance(source.part(0).array("text/utf8"), CachedSlices)
        assert kept == (kind != "none")
    assert all(each == found[0] for each in found)


def test_resumed_with_a_cache(store: FeatureStore, tmp_path: Path) -> None:
    options = options_of(store, steps=7, checkpoint_every=3, eval_every=4)
    wanted = losses_of(store, options)
    for kind in ("ram", "device"):
        cached, out = replace(options, cache=kind), tmp_path / kind
        stop(store, cached, out, 4)
        again = losses_of(open_store(store.path), cached, out, resume=True)
        assert again == wanted[3:], kind


def test_nothing_is_read_twice(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two epochs of a view reads nothing from the disk."""
    store, read = open_store(store.path), list[Any]()
    real = ShardSlices.read_into

    def watched(self: ShardSlices, begin: int, end: int, out: Any) -> None:
        read.append((self, begin, end))
        real(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", watched)
    _, collator, _ = prepare(options_of(store), store)
    for kind, resident in (("ram", False), ("device", True)):
        collator = collator.reading(cache.feature_source(store, kind, CPU))
        assert ("hidden" not in collator.features()) == resident
        for epoch in range(2):
            read.clear()
            batches = store.stream(0, epoch, 512, view=1, features=collator.features())
            for number, batch in enumerate(batches):
                collator(batch, 1, (0, epoch, number)).to(CPU)
            assert bool(read) == (epoch == 0)


@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_what_is_decoded_is_what_the_store_decodes(width: int) -> None:
    states = np.random.default_rng(width).normal(size=(9, width)).astype(np.float32) * 50
    logs, shares = -np.abs(states), np.abs(states) / np.abs(states).max()
    logs[::2] = -np.inf
    codecs: list[tuple[Codec, Array]] = [
        (Float32(), states), (Float16(), states), (Int8(), states), (Int4(64), states),
        (Int4(32), states), (Fixed(), logs), (Root(), logs), (Square(), shares), (Coarse(), shares),
    ]  # fmt: skip
    for codec, values in codecs:
        stored = codec.encode(values)
        tensors = {name: torch.from_numpy(array) for name, array in stored.items()}
        found = codec.decode(tensors, (width,), torch)
        assert found.dtype == torch.float32 and found.shape == values.shape
        np.testing.assert_array_equal(found, codec.decode(stored, (width,)))
        elsewhere = {name: tensor.to("meta") for name, tensor in tensors.items()}
        assert codec.decode(elsewhere, (width,), torch).device.type == "meta"
    square, codes = Square(), np.arange(256, dtype=np.uint8)
    found = square.from_codes(torch.from_numpy(codes), torch)
    np.testing.assert_array_equal(found, square.from_codes(codes))


def test_what_does_not_fit(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_memory(checked_plan(options_of(store, cache="ram"), store))
    size = 0
    for part in store.manifest.parts:  # the plain view is not read if a masked view exists
        for name, spec in part_arrays(store.features, part.counts).items():
            size += (
                0 if name.startswith("view0") else spec.dtype.itemsize * int(np.prod(spec.shape))
            )
    for kind in ("ram", "device"):
        enough = int(size / cache.SHARE) + 1
        monkeypatch.setattr(cache, "free_memory", lambda enough=enough: enough)
        check_memory(checked_plan(options_of(store, cache=kind), store))
        monkeypatch.setattr(cache, "free_memory", lambda enough=enough: enough - 3)
        check_memory(checked_plan(options_of(store), store))
        check_memory(checked_plan(options_of(store, cache=kind, loss={"mlm": 1.0}), store))
        with pytest.raises(UserError, match=f"^--cache {kind}: .* GiB of .* give --cache .*$"):
            check_memory(checked_plan(options_of(store, cache=kind), store))
        staged = options_of(store, cache=kind, view=0, stages=({"view": 0}, {"view": 1}))
        monkeypatch.setattr(cache, "free_memory", lambda enough=enough: enough)
        with pytest.raises(UserError, match=f"^--cache {kind}: "):  # of both views
            check_memory(checked_plan(staged, store))
    monkeypatch.setattr(cache, "free_memory", lambda: 1000)
    out = tmp_path / "out"
    words = ("--store", store.path, "--out", out, "--cache", "ram", "--vocab", "400")
    says(refused(main, *words), "--cache ram", "the main memory", "--cache none")
    says(refused(main, *words, "--workers", 2), "--cache ram and --workers 2", "its own copy")
    assert not out.exists()


def test_what_torch_kept_of_a_training_before_is_free(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that the first student of a sweep has filled has room for the second."""
    device, needs = torch.device("cuda"), [(store, {"hidden"}, {0})]
    for name, printed in {
        "mem_get_info": (1000, 2**34), "memory_reserved": 2**30 + 500, "memory_allocated": 500,
        "get_device_name": "H100",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda _, printed=printed: printed)
    assert cache.free_memory_of(device) == 2**30 + 1000
    cache.check_cache("device", device, needs)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**30 + 500)
    with pytest.raises(UserError, match="^--cache device: .* GiB of the memory of H100, "):
        cache.check_cache("device", device, needs)


def test_free_memory_is_some_of_what_there_is() -> None:
    """Values in kilobytes or pages would be below a 500th."""
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert everything / 500 < cache.free_memory() <= everything


@pytest.fixture
def cached_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEACHONCE_CACHE", str(tmp_path))
    return tmp_path / "tokens"


def fresh(kind: str, make_tokenizer: Tokenizers, length: int = 16) -> Tokenizer:
    tokenizer: Tokenizer = make_tokenizer(kind).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_table_holds_what_the_tokenizer_gives(
    store: FeatureStore, make_tokenizer: Tokenizers, cached_tokens: Path, kind: str
) -> None:
    tokenizer = fresh(kind, make_tokenizer)
    table = token_table(store, tokenizer)
    for index in (np.arange(len(store)), np.array([5, 0, 5, len(store) - 1]), np.array([3])):
        got = table.of(index)
        want = tokenize(tokenizer, [store[int(i)].text for i in index])
        for name in ("ids", "offsets", "special", "start"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_made_once_for_a_text_a_vocabulary_and_a_length(
    store: FeatureStore,
    make_tokenizer: Tokenizers,
    cached_tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_table(store, fresh("wordpiece", make_tokenizer))
    (first,) = cached_tokens.iterdir()
    monkeypatch.setattr(token_cache, "_write", None)  # no further file is written
    token_table(open_store(store.path), fresh("wordpiece", make_tokenizer))
    monkeypatch.undo()
    monkeypatch.setenv("TEACHONCE_CACHE", str(cached_tokens.parent))
    token_table(store, fresh("wordpiece", make_tokenizer, 12))
    token_table(store, fresh("unigram", make_tokenizer))
    assert len(list(cached_tokens.iterdir())) == 3 and first.exists()


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
def test_a_damaged_table_is_made_again(
    store: FeatureStore,
    make_tokenizer: Tokenizers,
    cached_tokens: Path,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    tokenizer, index = fresh("wordpiece", make_tokenizer), np.arange(len(store))
    want = token_table(store, tokenizer).of(index)
    (folder,) = cached_tokens.iterdir()
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    damage(folder / name)
    got = token_table(store, tokenizer).of(index)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.offsets, want.offsets)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == sound


def test_another_text_has_another_table(
    store: FeatureStore,
    make_tokenizer: Tokenizers,
    cached_tokens: Path,
    tmp_path: Path,
    tiny_teacher: Teachers,
) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Quite another text.\n", encoding="utf-8")
    out = dumped(tiny_teacher("bert"), text, tmp_path / "other.zarr")
    tokenizer = fresh("wordpiece", make_tokenizer)
    token_table(store, tokenizer)
    table = token_table(open_store(out), tokenizer)
    assert len(table.start) == 2 and len(list(cached_tokens.iterdir())) == 2


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


def test_several_at_once(
    store: FeatureStore, make_tokenizer: Tokenizers, cached_tokens: Path
) -> None:
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    arguments = (str(store.path), "wordpiece", gate, make_tokenizer)
    makers = [context.Process(target=_make, args=arguments) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0, 0, 0]
    assert len(list(cached_tokens.iterdir())) == 1


@pytest.mark.parametrize("name", ["ids", "begin", "special", "start"])
def test_a_forged_table_is_made_again(
    store: FeatureStore, make_tokenizer: Tokenizers, cached_tokens: Path, name: str
) -> None:
    """A user who can write the cache can also fit its checksum."""
    tokenizer = fresh("wordpiece", make_tokenizer)
    token_table(store, tokenizer)
    (folder,) = cached_tokens.iterdir()
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
