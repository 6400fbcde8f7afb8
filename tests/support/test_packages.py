"""Objects of other packages: each possible mistake in one is reported in a line."""

from pathlib import Path

import pytest

from teachonce.feature_store.captures.formats import ImportOptions, format_of
from teachonce.store import StoreError
from teachonce.store.format.codecs.levels import forms_of
from teachonce.support.errors import UserError
from teachonce.support.packages import added_object, load_outside

ENTRIES = """[teachonce.losses]
good = outside_things:NUMBER
absent = outside_things:ABSENT
raises = outside_raises:X
leaves = outside_leaves:X
twice = outside_things:NUMBER
[teachonce.codecs]
number = outside_things:NUMBER
[teachonce.captures]
number = outside_things:NUMBER
"""
LOSSES = "teachonce.losses"


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entries in (
        ("one", ENTRIES),
        ("two", f"[{LOSSES}]\ntwice = outside_things:OTHER\ngood = outside_things:NUMBER\n"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entries)
    (tmp_path / "outside_things.py").write_text("NUMBER, OTHER = 7, 8\n")
    (tmp_path / "outside_raises.py").write_text("raise RuntimeError('out of order')\n")
    (tmp_path / "outside_leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_object_is_found_by_its_name_or_its_place() -> None:
    assert added_object(LOSSES, "good") == 7 == load_outside("good", LOSSES, "--loss")
    assert load_outside("outside_things:OTHER", LOSSES, "--loss") == 8


@pytest.mark.parametrize("word", ["nobody", "", "a b", "good\n", ":X", "a:b:c", "../x:L", "x\n:L"])
def test_what_no_package_adds_is_none(word: str) -> None:
    assert load_outside(word, LOSSES, "--loss") is None


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("absent", "has no attribute 'ABSENT'"),
        ("raises", "out of order"),
        ("leaves", "exit 3"),
        ("outside_leaves:X", "exit 3"),
        ("no_such_module:X", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_loaded_is_a_line(word: str, why: str) -> None:
    with pytest.raises(UserError, match="cannot be loaded") as error:
        load_outside(word, LOSSES, "--loss")
    assert str(error.value).startswith(f"--loss {word}: ") and why in str(error.value)
    remedy = "on PYTHONPATH" if ":" in word else "install, update or remove that package"
    assert str(error.value).endswith(remedy)


def test_two_packages_with_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="--loss twice: several installed packages add it to"):
        load_outside("twice", LOSSES, "--loss")


def test_an_object_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="codec number: expected a Level, got int"):
        forms_of("number")
    with pytest.raises(UserError, match="--format number: expected a Format, got int"):
        format_of(ImportOptions(source=tmp_path, target=tmp_path / "s.zarr", format="number"))
