"""Options as data: a dataclass field declares everything about an option of a command, once.

    @dataclass(frozen=True)
    class Settings:
        align: str = option("span", "Alignment.", choices=("span", "match"), scope={STAGE})
        lr: float | None = option(None, "Peak learning rate.", within=POSITIVE)

        def __post_init__(self) -> None:
            parse_values(self)

The options of a command (`click_options`), the parsing of TOML (`read_values`) and the checks of
values (`parse_values`) are derived from the fields. They are the same for the command line, TOML
and Python. A field that was made without `option` is not an option.
"""

# Not pydantic: its import and one model take 0.075 s of CPU, a third of a `--help` (0.2 s). The
# conversion to click's types, defaults and completion below would still be needed.

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

import click

from teachonce.support.click_types import (
    Count,
    LocalPath,
    NameOrAdded,
    Names,
    Number,
    NumberOrWord,
    Text,
)
from teachonce.support.errors import UserError, suggest
from teachonce.support.option_types import Given, NotGiven
from teachonce.support.packages import added_object
from teachonce.support.parsing import local_path

KEY = "option"  # key of the option in a field's metadata
Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])


@dataclass(frozen=True)
class Range:
    """Holds the numbers that an option accepts; `expected` describes them in error messages.

    A bound is included unless it is open. Infinity and NaN are never accepted.
    """

    expected: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below and -math.inf < number < math.inf


POSITIVE = Range("a finite number above 0", low=0, open_low=True)
NOT_NEGATIVE = Range("0 or more, and finite", low=0)
SHARE = Range("a share from 0 to below 1", low=0, high=1, open_high=True)
INNER_SHARE = Range("a share between 0 and 1", low=0, high=1, open_low=True, open_high=True)


def at_least(least: int) -> Range:
    return Range(f"at least {least}", low=least)


@dataclass(frozen=True)
class Option:
    """Describes an option, except its name, type and default, which its field has.

    choices: the words that the option accepts; empty: any.
    added: group of entry points by which other packages add choices.
    words: words for shell completion; a value may also start with one.
    paths: complete paths in addition to `words`; without `words` paths are always completed.
    within: the numbers that it accepts; None: any.
    scope: where the option may be given, or what it affects, in the terms of its package.
    default_text: the default as --help prints it, if it depends on other options or on the store.
    repeated: it may be given several times; its field is a tuple.
    read: parses a word (or a tuple of words, if repeated); raises UserError.
    check: raises UserError for a wrong value that choices and range do not exclude.
    flag: its spelling on the command line, if it does not follow from the name.
    required: whether the command requires it.
    bare: its value on the command line if no word follows; empty: a word must follow.
    """

    help: str
    choices: tuple[str, ...] = ()
    added: str = ""
    words: Iterable[str] | Callable[[], Iterable[str]] = ()
    paths: bool = False
    within: Range | None = None
    scope: frozenset[str] = frozenset()
    default_text: str = ""
    repeated: bool = False
    read: Callable[[Any], Any] | None = None
    check: Callable[[Any], None] | None = None
    flag: str = ""
    required: bool = False
    bare: str = ""


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    scope: Iterable[str] = (),
    **about: Any,
) -> Any:
    """Declare a dataclass field as an option; `about` holds the other fields of `Option`."""
    metadata = {KEY: Option(help, scope=frozenset(scope), **about)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def same_option(settings: type[Any], name: str, default: Any, **changes: Any) -> Any:
    """Declare the option `name` of another dataclass again, with another default and `changes` of
    the fields of its `Option`."""
    about = dataclasses.replace(options_of(settings)[name], **changes)
    return dataclasses.field(default=default, metadata={KEY: about})


def _cached(function: Function) -> Function:
    """Cache a function of classes, which mypy does not count as hashable.

    Recipes and TOML files are checked value by value: without caches, reading the recipes of the
    package takes 60 ms, and each command with --recipe reads them several times.
    """
    return functools.cache(function)  # type: ignore[return-value]


def names_options(command: str) -> Callable[[Class], Class]:
    """Decorate a dataclass of options: its constructor suggests the most similar option for an
    unknown one. Raises TypeError as without the decorator.

    command: the command with the same options, whose --help documents them.
    """

    def decorate(settings: Class) -> Class:
        make: Any = settings.__init__
        names = [field.name for field in dataclasses.fields(settings)]

        @functools.wraps(make)
        def checked(self: Any, *values: Any, **named: Any) -> None:
            if unknown := sorted(named.keys() - set(names)):
                near = suggest(unknown[0], names)
                raise TypeError(
                    f"{type(self).__name__}: no option {unknown[0]!r}; {near}its fields are the"
                    f" options of {command}"
                )
            make(self, *values, **named)

        settings.__init__ = checked
        return settings

    return decorate


@_cached
def options_of(settings: type[Any]) -> Mapping[str, Option]:
    """Return the options of a dataclass by field name, in the order of the fields."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata[KEY] for field in fields if KEY in field.metadata}


def scoped(settings: type[Any], scope: str) -> frozenset[str]:
    """Return the names of the options that have this scope."""
    return frozenset(n for n, about in options_of(settings).items() if scope in about.scope)


def flag_of(name: str) -> str:
    """Return the spelling on the command line: `--batch-tokens` for `batch_tokens`."""
    return f"--{name.replace('_', '-')}"


def default_of(settings: type[Any], name: str) -> Any:
    """Return the default of a field; None if it has none."""
    (field,) = (field for field in dataclasses.fields(settings) if field.name == name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclass(frozen=True)
class _ValueType:
    """Describes the type of an option's values.

    kind: the plain type. optional: whether it may be None. words: the words that it accepts in
    addition to numbers, such as "epoch" for `int | Literal["epoch"]`. members: types in a tuple.
    """

    kind: type[Any]
    optional: bool
    words: tuple[str, ...]
    members: tuple[Any, ...]


# The hints of a dataclass are text, which `typing` would evaluate each time.
_hints = _cached(typing.get_type_hints)


@_cached
def _type_of(settings: type[Any], name: str) -> _ValueType:
    hint = _hints(settings)[name]
    if typing.get_origin(hint) is Given:
        hint = typing.get_args(hint)[0]
    union = typing.get_origin(hint) in (typing.Union, UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    literals = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    plain = next(kind for kind in kinds if kind is not NoneType and kind not in literals)
    choices = tuple(word for kind in literals for word in typing.get_args(kind))
    kind = typing.get_origin(plain) or plain
    return _ValueType(kind, NoneType in kinds, choices, typing.get_args(plain))


def parse_values(settings: Any) -> None:
    """Parse the values of a dataclass that are given as text, in place; see `parse_value`.

    Raises UserError for the first value that the option of its field does not accept.
    """
    of: type[Any] = type(settings)
    for name, about in options_of(of).items():
        given = getattr(settings, name)
        value = parse_value(of, name, given)
        if value is not given:
            object.__setattr__(settings, name, value)  # the dataclass may be frozen
        check_value(of, name, about, value)


def parse_value(settings: type[Any], name: str, value: Any) -> Any:
    """Convert a value that was given in Python to the type of its field.

    A string is parsed as on the command line. A list of strings is a comma-separated list, as in
    TOML; if the field is a tuple, a list becomes a tuple, and so does a single value. A path may be
    a string. A number of NumPy becomes a number of Python. Raises UserError for a string that the
    option cannot parse; other values are returned unchanged.
    """
    if isinstance(value, NotGiven):
        return value
    value = _plain(value)
    about, kind = options_of(settings)[name], _type_of(settings, name).kind
    if kind is tuple and isinstance(value, os.PathLike):
        value = [value]  # not a comma-separated list: a path may have a comma
    several = isinstance(value, list | tuple)
    items = value if several else [value]
    values = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in items]
    texts = bool(values) and all(isinstance(word, str) for word in values)
    if kind is tuple and value is None:
        return value
    if kind is Path and isinstance(value, Path):
        return local_path(value)
    # The list of a repeated option is not parsed again, because `replace` passes parsed values.
    if about.read and texts and not (several and kind is tuple and about.repeated):
        return about.read(tuple(values) if about.repeated else ",".join(values))
    if kind is tuple:
        member = _type_of(settings, name).members[0]
        return tuple(map(local_path if member is Path else member, values) if texts else values)
    if kind is Path and texts:
        if len(values) > 1:
            raise UserError(f"{flag_of(name)}: expected one path, got {len(values)}")
        return local_path(values[0])
    if kind in (int, float) and isinstance(value, str):
        with suppress(click.BadParameter):  # `check_value` refuses it
            return click_type(settings, name).convert(value, None, None)
    return ",".join(values) if texts else value


def _plain(value: Any) -> Any:
    """Return a number of NumPy, also in a list or a dict, as a number of Python, for JSON."""
    if isinstance(value, list | tuple):
        return list(map(_plain, value)) if isinstance(value, list) else tuple(map(_plain, value))
    if type(value) is dict:  # not a subclass, which may mark defaults
        return {name: _plain(item) for name, item in value.items()}
    # By the attributes of its scalars, also of booleans and of float64, a subclass of float.
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def check_value(settings: type[Any], name: str, about: Option, value: Any) -> None:
    """Raise UserError if an option of a dataclass does not accept this value."""
    value_type = _type_of(settings, name)
    if (value is None and value_type.optional) or value in value_type.words:
        return
    problem = ""
    if value_type.kind in EXPECTED and not _is_of(value_type.kind, value):
        problem = f"expected {EXPECTED[value_type.kind]}"
    elif value_type.kind is tuple and value != default_of(settings, name):
        member = value_type.members[0]
        if not isinstance(value, tuple):
            problem = "expected a tuple"
        elif wrong := [item for item in value if not _is_of(member, item)]:
            value, problem = wrong[0], f"expected {EXPECTED[member]}"
    elif about.choices and not about.repeated and not _is_choice(about, value):
        problem = f"expected one of {', '.join(about.choices)}"
    elif about.within is not None and value not in about.within:
        problem = f"expected {about.within.expected}"
    if problem:
        problem += "".join(f", or {word}" for word in value_type.words)
        shown = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{flag_of(name)} {shown}: {problem}")
    if about.check is not None:
        about.check(value)


def _is_choice(about: Option, value: Any) -> bool:
    if value in about.choices:
        return True
    return bool(about.added) and added_object(about.added, str(value)) is not None


EXPECTED: dict[type[Any], str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    Path: "a path",
}


def _is_of(kind: type[Any], value: Any) -> bool:
    # First, because for Python True is an Integral number.
    if isinstance(value, bool):
        return kind is bool
    if kind in (str, Path):
        return isinstance(value, str | os.PathLike)  # a string may be the path of a store or model
    return isinstance(value, {int: Integral, float: Real, bool: bool}[kind])  # NumPy's too


def click_type(settings: type[Any], name: str) -> click.ParamType[Any]:
    """Return the click type that parses a word of an option."""
    about, value_type = options_of(settings)[name], _type_of(settings, name)
    kind = value_type.kind
    if about.choices:
        return NameOrAdded(about.choices, about.added) if about.added else Names(about.choices)
    if kind is Path or Path in value_type.members:
        return LocalPath()
    # SWEEP: the command that accepts repeated options, and the scope of options that it accepts
    # only once.
    command, once = getattr(settings, "SWEEP", ("", ""))
    sweep = "" if once in about.scope else command
    plain: dict[type[Any], click.ParamType[Any]]
    plain = {int: Count(sweep), float: Number(sweep), bool: click.BOOL}
    read = plain.get(kind) or Text(about.words, about.paths)
    return NumberOrWord(read, value_type.words) if value_type.words else read


def click_option(
    settings: type[Any], name: str, *, varied: bool = False, **changes: Any
) -> click.Option:
    """Return an option for click, with the default of its field; `changes` override its arguments.

    The command receives the value as click parses it; `read_words` converts it for the field. A
    `varied` option may be given several times, for several settings of a sweep. It has no default,
    and its help shows the default of the field.
    """
    about, kind = options_of(settings)[name], _type_of(settings, name).kind
    default = default_of(settings, name)
    shown_default = about.default_text
    if varied and not shown_default and not about.read and isinstance(default, (str, int, float)):
        word = flag_of(name).removeprefix("--")
        shown_default = str(default) if kind is not bool else word if default else f"no-{word}"
    help = about.help + (f"  [default: {shown_default}]" if shown_default else "")
    arguments: dict[str, Any] = {
        "type": click_type(settings, name),
        "help": help,
        "required": about.required,
        "multiple": about.repeated or varied,
        "default": default,
        "show_default": not shown_default,
    }
    spelt = about.flag or flag_of(name)
    if kind is bool:
        spelt = about.flag or f"{flag_of(name)}/--no-{flag_of(name)[2:]}"
        shown = "/" in spelt and not shown_default
        arguments |= {"is_flag": True, "show_default": shown}
    if about.bare:
        arguments |= {"is_flag": False, "flag_value": about.bare}
    if about.repeated or about.read or about.required or varied:
        # With a default of None, click does not report that a required option is missing.
        del arguments["default"]
    return click.Option([spelt, name], **arguments | changes)


def click_options(settings: type[Any]) -> list[click.Parameter]:
    """Return the options of a dataclass as the `params` of a command."""
    return [click_option(settings, name) for name in options_of(settings)]


def read_words(settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, values by option name. Texts and tuples of texts are parsed by the `read` of
    their option."""
    values, about = dict(given), options_of(settings)
    for name, value in given.items():
        read = about[name].read if name in about else None
        if read is not None and isinstance(value, (str, tuple)):
            values[name] = read(value)
    return values


def is_flag(settings: type[Any], name: str) -> bool:
    """Return whether an option is a flag, which takes no value."""
    return _type_of(settings, name).kind is bool


def command_words(table: Mapping[str, Any]) -> list[str]:
    """Convert a TOML table to words of a command line. `true` becomes the flag, `false` is left
    out, and a list repeats its option."""
    words = list[str]()
    for key, value in table.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not False:
                words += [flag_of(key)] if item is True else [flag_of(key), str(item)]
    return words


def read_values(
    settings: type[Any], table: Mapping[str, Any], where: str, known: Iterable[str]
) -> dict[str, Any]:
    """Return values for the fields from a TOML table. Types, choices and ranges are checked as on
    the command line.

    A list is read as a comma-separated list. Raises UserError, naming `where`, for a key that is
    not `known` and for a value that its option does not accept.
    """
    values, allowed = {}, set(known)
    for name, value in table.items():
        if name not in allowed:
            raise UserError(
                f"{where}: unknown key {name!r}; {suggest(name, allowed)}expected one of"
                f" {', '.join(sorted(allowed))}"
            )
        about, parts = options_of(settings)[name], value if isinstance(value, list) else [value]
        if not all(isinstance(word, str | int | float) for word in parts):
            raise UserError(f"{where}: {name}: expected a string, a number or a list of strings")
        text = ",".join(map(str, parts))
        try:
            if about.read:
                values[name] = about.read(text)
            else:
                values[name] = click_type(settings, name).convert(text, None, None)
            check_value(settings, name, about, values[name])
        except click.UsageError as error:
            raise UserError(f"{where}: {name}: {error.message}") from None
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return values
