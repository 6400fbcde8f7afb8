"""Types of options that accept more than they return: text for a path, one word for a tuple.

    @dataclass(frozen=True)
    class Settings:
        out: MaybePath = option(None, "Folder of the student.")

A type checker accepts `Settings(out="x")`, and takes `settings.out` for `Path | None`. At run time
the annotations convert nothing: `parse_values` converts a given value to the type that is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

Read_co = TypeVar("Read_co", covariant=True)
Given_contra = TypeVar("Given_contra", contravariant=True)


class Given(Generic[Read_co, Given_contra]):
    """Annotates a dataclass field by two types: the type of its value, and the type that the
    constructor accepts.

    Type checkers find both in the methods of a descriptor. No object of this class exists. The
    fields of a frozen dataclass must not be inherited by another dataclass: mypy would take the
    second type for both.
    """

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: Any) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: Any) -> Read_co: ...

        def __get__(self, instance: Any, owner: Any) -> Any: ...

        def __set__(self, instance: Any, value: Given_contra) -> None: ...


class NotGiven:
    """Marks a default value that other options or stores may replace. A given value is never
    marked, even if it equals the default."""


class DefaultText(str, NotGiven):
    """Holds a default text that other options or stores may replace."""


class DefaultNumber(float, NotGiven):
    """Holds a default number that other options or stores may replace."""


class DefaultCount(int, NotGiven):
    """Holds a default whole number that other options or stores may replace."""


class DefaultWeights(dict[str, float], NotGiven):
    """Holds default weights by name that other options or stores may replace."""


def plain(value: Any) -> Any:
    """Return a value without its `NotGiven` mark."""
    plain_kinds: tuple[Any, ...] = (str, float, int, dict) if isinstance(value, NotGiven) else ()
    return next((kind(value) for kind in plain_kinds if isinstance(value, kind)), value)


AnyPath = str | PathLike[str]
PathWord = Given[str, AnyPath]
MaybePathWord = Given[str | None, AnyPath | None]
SomePath = Given[Path, AnyPath]
MaybePath = Given[Path | None, AnyPath | None]
PathOrUrl = Given[str | Path, AnyPath]
MaybePathOrUrl = Given[str | Path | None, AnyPath | None]
Paths = Given[tuple[Path, ...], AnyPath | Sequence[AnyPath]]
PathWords = Given[tuple[str, ...], AnyPath | Sequence[AnyPath]]
FirstPathWord = Given[str, AnyPath | Sequence[AnyPath]]
CommaList = Given[str, str | Sequence[str]]
MaybeCommaList = Given[str | None, str | Sequence[str] | None]
Words = Given[tuple[str, ...], str | Sequence[str]]
Sizes = Given[tuple[int, ...], str | int | Sequence[int]]
Weights = Given[Mapping[str, float], str | Sequence[str] | Mapping[str, float]]
Tables = Given[tuple[Mapping[str, Any], ...], Sequence[Mapping[str, Any]]]
