"""The settings that vary in a sweep: choices and ranges, from the command line and a TOML file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.student_train.settings.option_fields import loss_words
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError, suggest
from teachonce.support.options import options_of, read_values
from teachonce.support.parsing import read_toml

RANGE: dict[str, Any] = {"low": None, "high": None, "log": False}
WEIGHT = "loss."
"""Prefix of a dimension that is the weight of one loss."""


@dataclass(frozen=True)
class Interval:
    """Holds an interval of numbers from `low` to `high`, both included. They are drawn on a
    logarithmic scale if `log`."""

    low: float
    high: float
    log: bool
    whole: bool


Choices = tuple[Any, ...]
Space = Mapping[str, Choices | Interval]
"""The choices or the range of each option and each loss weight, by name, as click parses them."""
Point = Mapping[str, Any]
"""One value of each dimension of a Space."""


def read_space(path: Path, options: Sequence[str]) -> Space:
    """Read a file of `--grid`: a list of settings, or a range of numbers, for each option.

    Raises UserError, with file and key, for anything else, and for an invalid value.
    """
    space = dict[str, Choices | Interval]()
    for name, value in read_toml(path).items():
        if name not in options:
            raise UserError(
                f"{path}: unknown key {name!r}; {suggest(name, options)}options that a sweep"
                f" can vary are {', '.join(sorted(options))}"
            )
        if name == "loss" and isinstance(value, dict):
            for loss, weight in value.items():
                space[f"{WEIGHT}{loss}"] = _dimension(name, weight, str(path), loss)
        else:
            space[name] = _dimension(name, value, str(path))
    if not space:
        raise UserError(f"{path}: has no settings; give lists, such as lr = [0.001, 0.003]")
    return space


def _dimension(name: str, value: Any, where: str, loss: str = "") -> Choices | Interval:
    if isinstance(value, dict):
        return _range(name, value, where, loss)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{where}: {name}: an empty list; give at least one setting")
    return tuple(dict.fromkeys(_setting(name, item, where, loss) for item in values))


def _range(name: str, table: Mapping[str, Any], where: str, loss: str) -> Interval:
    low, high, log = (table.get(name, default) for name, default in RANGE.items())
    # Not isinstance: true and false are integers.
    numbers = all(type(end) in (int, float) for end in (low, high))
    if not numbers or not table.keys() <= RANGE.keys() or type(log) is not bool:
        raise UserError(
            f"{where}: {name}: expected a list, or a range {{low = 1, high = 9, log = true}}"
        )
    if not low < high or (log and low <= 0):
        least = " above 0" if log else ""
        raise UserError(
            f"{where}: {name}: low {low}, high {high}: expected low{least} less than high"
        )
    parsed = [_setting(name, end, where, loss) for end in (low, high)]
    # The option decides: a range of a fractional option has fractions even if its ends are whole.
    whole = type(low) is type(high) is int and not loss and not isinstance(parsed[0], float)
    return Interval(low, high, log, whole)


def _setting(name: str, value: Any, where: str, loss: str) -> Any:
    """Check a value, and return it as click would parse it."""
    if loss:
        read_values(TrainOptions, {name: f"{loss}={value}"}, where, [name])
        return value
    if name == "recipe":
        return str(value)
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    parsed = read_values(TrainOptions, {name: value}, where, [name])[name]
    return text if options_of(TrainOptions)[name].read else parsed


def overridden(space: Space, given: Mapping[str, Sequence[Any]]) -> Space:
    """Override the settings of the file by the settings of the command line."""
    named = {name for name, values in given.items() if values}
    from_file = {name: choices for name, choices in space.items() if option_of(name) not in named}
    # A setting that is given twice is one student.
    return {name: tuple(dict.fromkeys(given[name])) for name in given if name in named} | from_file


def option_of(dimension: str) -> str:
    return dimension.partition(".")[0]


def varied(space: Space) -> list[str]:
    """Return the options with more than one value."""
    names = (n for n, v in space.items() if isinstance(v, Interval) or len(v) > 1)
    return list(dict.fromkeys(map(option_of, names)))


def arguments_of(point: Point) -> dict[str, Any]:
    """Convert a point to arguments of the command line. Loss weights become one --loss."""
    arguments = {name: value for name, value in point.items() if not name.startswith(WEIGHT)}
    weights = {n.removeprefix(WEIGHT): v for n, v in point.items() if n.startswith(WEIGHT)}
    if weights:
        arguments["loss"] = loss_words(weights)
    return arguments


def points(space: Space, where: str = "") -> Iterator[Point]:
    """Yield every combination of the settings. Raises UserError, which begins with `where`, for a
    range, because it has no finite list of values."""
    choices = list[Choices]()
    for name, dimension in space.items():
        if isinstance(dimension, Interval):
            raise UserError(f"{where}{name}: a range needs --trials N; or give a list")
        choices.append(dimension)
    for values in itertools.product(*choices):
        yield dict(zip(space, values, strict=True))


def corners(space: Space) -> Iterator[Point]:
    """Yield points that together contain every choice and both ends of every range."""
    ends = {n: (e.low, e.high) if isinstance(e, Interval) else e for n, e in space.items()}
    first = {name: values[0] for name, values in ends.items()}
    yield first
    for name, values in ends.items():
        for value in values[1:]:
            yield {**first, name: value}


def space_record(space: Space) -> dict[str, Any]:
    """Describe a space as JSON, for comparison with an earlier command's."""
    return {n: vars(e) if isinstance(e, Interval) else list(e) for n, e in space.items()}
