"""Copies of forgotten texts are removed or named, and readers of the store detect the change."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from teachonce.store import StoreError, UserError, open_store
from teachonce.store.read import change_watch, derived_copies
from teachonce.store.read.derived_copies import list_of, record_copy
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from teachonce.support.files import cache_folder
from tests.making.stores import SMALL, make_store
from tests.store.tools import forgetting
from tests.store.tools.forgetting import holding
from tests.store.tools.test_commands import run

GONE = 1
EITHER = pytest.mark.parametrize("store", ("zarr", "h5"), indirect=True)
CHANGED = "documents were forgotten, or another store now has its name"


@pytest.fixture
def path(store: Path) -> Path:
    return store


@pytest.fixture(autouse=True)
def every_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(change_watch, "SECONDS", 0.0)
    monkeypatch.setattr(change_watch, "SECONDS_REMOTE", 0.0)
    monkeypatch.setenv("TEACHONCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(derived_copies, "_said", set())


def gone_text(path: Path) -> str:
    with open_store(path) as store:
        return max((record.text for record in store if record.document == GONE), key=len)


def forgotten(path: Path, *numbers: int) -> dict[str, Any]:
    file = path.parent / "list"
    file.write_text("\n".join(map(str, numbers or (GONE,))))
    result = run("forget", path, "--documents", file, "--json")
    file.unlink()
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_caches_go_and_copies_are_named(path: Path, tmp_path: Path) -> None:
    text, out = gone_text(path), tmp_path / "out"
    with open_store(path) as store:
        store.to_datasets(columns=["text"], cache_dir=tmp_path / "rows")
        store.to_parquet(out / "a.parquet", columns=["text"])
    assert run("page", path).exit_code == 0
    convert(path, out / "copy.h5")
    merge([path, out / "copy.h5"], out / "both.zarr")
    upload(path, "memory://far/a.zarr")
    assert run("export", path, out / "rows", "--to", "datasets", "--columns", "text").exit_code == 0
    (mapped := tmp_path / "rows" / "cache-0123.arrow").write_text("made by map")
    assert len(holding(tmp_path / "rows", text)) == 1
    facts = forgotten(path)
    assert facts["removed_caches"] and holding(tmp_path / "rows", text) == []
    named = {each["path"]: each["kind"] for each in facts["copies"]}
    assert named == {
        str(tmp_path / "a-page.html"): "page",
        str(out / "a.parquet"): "table",
        str(out / "copy.h5"): "store",
        str(out / "both.zarr"): "store",
        "memory://far/a.zarr": "address",
        str(out / "rows"): "table",
        str(mapped): "mapped",
    }
    assert facts["copies_not_found"] == []
    assert verify(path).problems == verify(path).unknown == []
    shutil.rmtree(out)
    convert(path, tmp_path / "later.zarr")  # in the text that remains
    facts = forgotten(path, 2)
    names = [each["path"] for each in facts["copies"]]
    assert names == [
        str(tmp_path / "a-page.html"), "memory://far/a.zarr", str(tmp_path / "later.zarr"),
        str(mapped),
    ]  # fmt: skip
    assert len(facts["copies_not_found"]) == 5


def test_lines_name_a_remedy(path: Path, tmp_path: Path) -> None:
    assert run("page", path).exit_code == 0
    (tmp_path / "list").write_text("1")
    lines = run("forget", path, "--documents", tmp_path / "list").output
    assert f"may hold the texts: {tmp_path}/a-page.html (20" in lines
    assert "a page, which quotes texts: remove it, and make it again" in lines
    (tmp_path / "a-page.html").unlink()
    assert run("page", path).exit_code == 0
    (tmp_path / "list").write_text("2")
    assert "a-page.html" in run("forget", path, "--documents", tmp_path / "list").output


@pytest.mark.parametrize("command", ("to_parquet", "convert", "merge"))
def test_a_refused_copy_is_not_named(path: Path, tmp_path: Path, command: str) -> None:
    other = tmp_path / "other.zarr"
    make_store(other, SMALL, parts=1)
    works: dict[str, Callable[[], object]] = {
        "to_parquet": lambda: open_store(path).to_parquet(other),
        "convert": lambda: convert(path, other),
        "merge": lambda: merge([path, other], other),
    }
    with pytest.raises(UserError, match=f"{other}: exists already"):
        works[command]()
    assert forgotten(path)["copies"] == []


def test_an_untrusted_list_removes_nothing_else(path: Path, tmp_path: Path) -> None:
    """An untrusted list removes and awaits no other files: outside, of other stores, links,
    pipes."""
    other, rows = tmp_path / "other.zarr", tmp_path / "rows"
    make_store(other, SMALL, parts=1)
    with open_store(other) as store:
        store.to_datasets(columns=["text"], cache_dir=rows)
    theirs = next(rows.glob("*.arrow"))
    with open_store(path) as store:
        text, manifest = store.manifest.text_key, store.manifest
    tokens = tmp_path / "tokens" / f"{text}-x"
    victims = [tmp_path / f"{'0' * 32}.arrow", tmp_path / "mine.txt", tokens / "mine.txt", theirs]
    for victim in victims[:3]:
        victim.parent.mkdir(exist_ok=True, parents=True)
        victim.write_text("mine")
    os.mkfifo(tmp_path / f"{'1' * 32}.arrow")
    (tmp_path / f"{'2' * 32}.arrow").symlink_to(theirs)
    for victim in (*tmp_path.glob("*.arrow"), *victims, tmp_path, tokens, Path("/etc/passwd")):
        for kind in ("datasets", "tokens", "disk cache", "page", "\x1b[2J"):
            record_copy(str(path), manifest, kind, victim)
    with list_of(path).open("a") as file:
        file.write('[]\n{"kind": 1}\nnothing\n{"kind": "page", "path": "\\u0000", "text": ""}\n')
    before = sorted(tmp_path.rglob("*"))
    facts = forgotten(path)
    assert facts["removed_caches"] == []
    missing = [each for each in before if not os.path.lexists(each)]
    assert [each for each in missing if path not in each.parents] == []
    assert all(victim.exists() for victim in victims)


@pytest.mark.parametrize("kind", ("folder", "link", "pipe"))
def test_a_list_that_cannot_be_written(
    path: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the list cannot be written, one line reports it, and the user's list has the copy."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    if kind == "folder":
        list_of(path).mkdir()
    elif kind == "link":
        list_of(path).symlink_to(victim)
    else:
        os.mkfifo(list_of(path))
    convert(path, tmp_path / "copy.zarr")
    convert(path, tmp_path / "other.zarr")
    assert victim.read_text() == "mine"
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{path}: cannot record next to it what is made from it (" in line
    assert list((cache_folder() / "derived").iterdir())
    named = {Path(each["path"]).name for each in forgotten(path)["copies"]}
    assert named == {"copy.zarr", "other.zarr"}


def test_a_store_that_was_renamed(path: Path, tmp_path: Path) -> None:
    """After a store was renamed, its copies are found by its text, also after a first `forget`."""
    text, rows, moved = gone_text(path), tmp_path / "rows", tmp_path / "new" / "b.zarr"
    with open_store(path) as store:
        store.to_datasets(columns=["text"], cache_dir=rows)
    assert run("page", path).exit_code == 0
    moved.parent.mkdir()
    path.rename(moved)
    (tmp_path / "list").write_text("1")
    lines = run("forget", moved, "--documents", tmp_path / "list").output
    assert "removed " in lines and holding(rows, text) == []
    assert f"may hold the texts: {tmp_path}/a-page.html" in lines
    assert f"{list_of(moved)}: not found; if the store was renamed or moved" in lines
    moved.rename(path)
    list_of(path).unlink()
    assert [each["kind"] for each in forgotten(path, 2)["copies"]] == ["page"]


def test_a_disk_cache_of_a_store_at_an_address(path: Path, tmp_path: Path) -> None:
    """When texts are forgotten in a local copy, a disk cache loses the entries of the store at an
    address and of a recoded store with the same text; entries of another store remain."""
    other, recoded, cache = (tmp_path / name for name in ("other.zarr", "small.zarr", "disk"))
    make_store(other, SMALL, parts=1)
    convert(path, recoded, codec="small")

    def read(store: Path) -> int:
        with open_store(f"file://{store}", cache=f"disk:{cache},100MB") as far:
            list(far.texts())
        return len(list(cache.iterdir()))

    alone = read(other)
    assert alone < read(path) < read(recoded)
    copy = tmp_path / "copy.h5"
    convert(path, copy)
    facts = forgotten(copy)
    assert str(cache) in facts["removed_caches"]
    assert str(copy) not in {each["path"] for each in facts["copies"]}
    assert len(list(cache.iterdir())) == alone


def _reading(how: str, path: Path) -> Iterator[Any]:
    store = open_store(path)
    if how == "stream":
        yield from store.stream(batch_tokens=64, features=())
    elif how == "gather":
        yield from store.gather([[n] for n in range(len(store))])
    elif how == "texts":
        for begin, end in store.blocks(8).tolist():
            yield from store.texts([[begin, end]])
    elif how == "records":
        yield from (store[number].text for number in range(len(store)))
    elif how == "fields":
        yield from (record.text for record in [*store])
    elif how == "kept":
        store.cache_arrays(lambda name: True)
        for _ in range(9):
            yield from store.stream(batch_tokens=64)
    else:
        yield from store.table(["text"]).batches()


@EITHER
@pytest.mark.parametrize("how", ("stream", "gather", "texts", "records", "fields", "kept"))
def test_a_reader_stops(path: Path, how: str) -> None:
    """A reader of a changed store stops, also if all of its data are in memory or mapped."""
    batches = _reading(how, path)
    next(batches)
    forgotten(path)
    with pytest.raises(StoreError, match=f"was rewritten while it was being read; {CHANGED}"):
        list(batches)


@EITHER
def test_what_is_no_change(path: Path) -> None:
    """A new timestamp or an equal copy of the root file does not count as a change."""
    store = open_store(path)
    root = path / "zarr.json" if path.is_dir() else path
    store.watch.check()
    os.utime(root, (1, 1))
    store.watch.check()
    (again := root.with_name("again")).write_bytes(root.read_bytes())
    os.replace(again, root)
    store.watch.check()
    pickle.loads(pickle.dumps(store)).watch.check()


@EITHER
def test_another_process_opens_the_same_store(path: Path) -> None:
    with open_store(path) as store:
        pickled = pickle.dumps(store)
        forgotten(path)
        with pytest.raises(StoreError, match=CHANGED):
            pickle.loads(pickled)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(StoreError, match="was deleted or moved while it was being read"):
            store.watch.check()


def test_a_store_at_an_address_that_is_replaced(path: Path, tmp_path: Path) -> None:
    far = tmp_path / "far.zarr"
    shutil.copytree(path, far)
    batches = open_store(f"file://{far}").stream(batch_tokens=64)
    next(batches)
    forgotten(path)
    shutil.rmtree(far)
    shutil.copytree(path, far)
    with pytest.raises(StoreError, match=CHANGED):
        list(batches)


def _in_the_middle(path: Path, work: Callable[..., Any]) -> Any:
    """Return the progress bar of a command; the bar runs `forget` after the first part."""

    def bar(items: Any) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 1:
                forgetting.run(path, GONE)
            yield item

    return work(bar)


@EITHER
@pytest.mark.parametrize("command", ("convert", "convert_codec", "merge"))
def test_forgetting_while_a_copy_is_made(path: Path, tmp_path: Path, command: str) -> None:
    """A copy that is made during `forget` is refused, never sealed, and named."""
    other, target = tmp_path / "other.zarr", tmp_path / "new.zarr"
    if command == "merge":
        make_store(other, SMALL, parts=1)
    works: dict[str, Callable[..., object]] = {
        "convert": lambda bar: convert(path, target, progress=bar),
        "convert_codec": lambda bar: convert(path, target, "small", progress=bar),
        "merge": lambda bar: merge([path, other], target, True, progress=bar),
    }
    with pytest.raises(StoreError, match=CHANGED):
        _in_the_middle(path, works[command])
    with pytest.raises(StoreError, match="is not finished"):
        open_store(target)
    assert str(target) in [each["path"] for each in forgotten(path, 2)["copies"]]


@EITHER
def test_forgetting_while_a_store_is_verified(path: Path) -> None:
    """`forget` during `verify` is not reported as damage: the store is verified again."""

    def verified(bar: Callable[..., Any]) -> list[str]:
        return verify(path, progress=lambda items, unit: bar(items)).problems

    try:
        assert _in_the_middle(path, verified) == []
    except StoreError as error:
        assert CHANGED in str(error)
    assert verify(path).problems == []


def test_a_forgotten_document_that_is_added_again(path: Path, tmp_path: Path) -> None:
    """A forgotten document can be added again, because no store keeps its hash; it has a new number
    and can be forgotten again."""
    text, other = gone_text(path), tmp_path / "other.zarr"
    convert(path, other)
    forgotten(path)
    merge([path, other], tmp_path / "both.zarr")
    with open_store(tmp_path / "both.zarr") as store:
        again = {record.document for record in store if record.text == text}
    assert again and GONE not in again
    forgotten(tmp_path / "both.zarr", *again)
    assert not holding(tmp_path / "both.zarr", text)
