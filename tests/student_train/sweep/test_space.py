"""The search space of a sweep: lists and ranges of a TOML file, with overrides from the command
line."""

from __future__ import annotations

from pathlib import Path

import pytest

from teachonce.student_train.sweep.space import (
    Interval,
    arguments_of,
    corners,
    over,
    points,
    read_space,
    varied,
)
from teachonce.support.errors import UserError

KNOWN = ["lr", "loss", "vocab", "steps", "best", "recipe", "student"]


def test_a_grid(tmp_path: Path) -> None:
    text = 'lr = [0.1, "3e-4"]\nloss = ["mlm", ["mlm=1", "kl=2"]]\nbest = true'
    space = read_space(_written(tmp_path, text), KNOWN)
    assert space == {"lr": (0.1, 3e-4), "loss": ("mlm", "mlm=1,kl=2"), "best": (True,)}
    assert varied(space) == ["lr", "loss"]
    assert len(list(points(space))) == 4
    given = over(space, {"lr": (0.5,), "vocab": ("5k", "10k"), "steps": ()})
    assert given == {"lr": (0.5,), "vocab": ("5k", "10k"), "loss": space["loss"], "best": (True,)}


def test_a_setting_given_twice_is_one_student(tmp_path: Path) -> None:
    space = read_space(_written(tmp_path, 'lr = [0.1, 0.3, "1e-1"]'), KNOWN)
    assert space == {"lr": (0.1, 0.3)}
    given = over(space, {"vocab": ("5k", "10k", "5k")})
    assert given == {"lr": (0.1, 0.3), "vocab": ("5k", "10k")}


def test_ranges(tmp_path: Path) -> None:
    text = """
lr = {low = 1e-4, high = 1, log = true}
vocab = {low = 500, high = 5000}
loss = {mlm = 1, kl = {low = 0.5, high = 2}}
"""
    space = read_space(_written(tmp_path, text), KNOWN)
    assert space["lr"] == Interval(1e-4, 1, True, False)
    assert space["vocab"] == Interval(500, 5000, False, True)
    assert varied(space) == ["lr", "vocab", "loss"]
    ends = list(corners(space))
    assert len(ends) == 4 and ends[0]["lr"] == 1e-4
    assert arguments_of(ends[-1]) == {"lr": 1e-4, "vocab": 500, "loss": "mlm=1,kl=2"}
    with pytest.raises(UserError, match="lr: a range needs --trials N"):
        list(points(space))
    assert over(space, {"loss": ("mlm",)}).keys() == {"loss", "lr", "vocab"}  # without weights


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = [0.1", "not TOML"),
        ("", "has no settings"),
        ("rate = [0.1]", "unknown key 'rate'"),
        ("lr = []", "lr: an empty list"),
        ('lr = ["quick"]', "lr: 'quick': expected a number, such as"),
        ("lr = [-1.0]", "--lr -1: expected"),
        ("lr = {low = 1, high = 0}", "low less than high"),
        ("lr = {low = 0, high = 1, log = true}", "low above 0"),
        ("lr = {from = 1, to = 2}", "expected a list, or a range"),
        ('student = {low = 1, high = "9"}', "expected a list, or a range"),
        ("loss = {mlm = 1, wishful = 1}", "wishful"),
    ],
)
def test_what_is_no_space(tmp_path: Path, text: str, message: str) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_space(path, KNOWN)
    assert str(path) in str(error.value) and message in str(error.value)


def _written(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path
