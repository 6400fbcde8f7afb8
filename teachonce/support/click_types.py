"""The types of click that parse, and complete, the values of options and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from teachonce.support.errors import UserError, suggest
from teachonce.support.packages import added_object
from teachonce.support.parsing import DIGITS, local_path


def _refuse_empty(
    kind: click.ParamType[Any], value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Raise BadParameter for an empty word. Many options would treat it as not given, and `Path` as
    the current folder."""
    if value == "":
        remedy = "give a value" if param and param.required else "give a value, or leave it out"
        words = f"is empty, perhaps because a variable of the shell is not set; {remedy}"
        kind.fail(words, param, ctx)


class Text(click.types.StringParamType):
    """Reads text, as a click type. A shell completes it to paths, to `words`, or to both.

    words: the words that a value may equal or start with, or a function that returns them if that
        takes time. An empty word is refused unless it is one of them. paths: complete paths as
        well; without `words`, paths are always completed.
    """

    def __init__(
        self, words: Iterable[str] | Callable[[], Iterable[str]] = (), paths: bool = False
    ) -> None:
        self._words, self._paths = words, paths or words == ()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if callable(self._words) or "" not in self._words:
            _refuse_empty(self, value, param, ctx)
        return super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the word after the last comma, because some options are comma-separated
        lists."""
        # Files come first: bash drops completions that were offered before files, and shows files
        # if no word fits.
        before, comma, typed = incomplete.rpartition(",")
        words = self._words() if callable(self._words) else self._words
        files = [CompletionItem(incomplete, type="file")] if self._paths else []
        fitting = (word for word in words if word.startswith(typed))
        return [*files, *(CompletionItem(f"{before}{comma}{word}") for word in fitting)]


PATH = Text()
"""The path of a file or a folder, or an address."""


class LocalPath(click.Path):
    """Reads a path on this machine as a Path, as a click type, and refuses a URL. `checks`:
    keywords of `click.Path`, such as `exists`."""

    def __init__(self, **checks: bool) -> None:
        super().__init__(path_type=Path, **checks)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _refuse_empty(self, value, param, ctx)
        try:
            local_path(value)
        except UserError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Names(click.Choice[str]):
    """Reads one of several names. The error for another word suggests the most similar name."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        near = suggest(str(value), self.choices)
        return f"{value!r}: {near}expected one of {', '.join(self.choices)}"


class NameOrAdded(Names):
    """Reads, as a click type, one of the built-in names, or a name that an installed package adds
    to the entry points of `group`."""

    def __init__(self, names: tuple[str, ...], group: str) -> None:
        super().__init__(names)
        self._group = group

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            try:
                if added_object(self._group, str(value)) is not None:
                    return value
            except UserError as error:
                self.fail(str(error), param, ctx)
            raise


def _repeated(value: Any, param: click.Parameter | None, sweep: str) -> str:
    """Return the end of a message, which shows how to repeat an option instead of giving a
    comma-separated list.

    Returns "" if `value` has no comma, or if no command accepts repetitions. sweep: the command
    that accepts repetitions if the running command does not; or "".
    """
    multiple = getattr(param, "multiple", False)
    if param is None or not (multiple or sweep) or "," not in str(value):
        return ""
    options = " ".join(f"{param.opts[0]} {part}" for part in value.split(","))
    return f"; repeat it: {options}" if multiple else f"; to compare several: {sweep} {options}"


class Count(click.types.IntParamType):
    """Reads a whole number, also in thousands or millions: 50k, 1.5m."""

    def __init__(self, sweep: str = "") -> None:
        self.sweep = sweep

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = re.fullmatch(rf"({DIGITS}(?:\.[0-9]+)?)([km])", str(value).lower())
        if match:
            # As floats, 2.01 * 1000 is 2009.9999999999998.
            number = Decimal(match[1]) * {"k": 1000, "m": 1_000_000}[match[2]]
            if number == int(number):
                return int(number)
        # click would also accept whatever int() does, such as 1_000.
        if not isinstance(value, int) and not re.fullmatch(r"[+-]?\d+", str(value)):
            several = _repeated(value, param, self.sweep)
            problem = f"{value!r}: expected a whole number, such as 200, 50k or 2m{several}"
            self.fail(problem, param, ctx)
        return super().convert(value, param, ctx)


class Number(click.types.FloatParamType):
    """Reads a number. The error message shows how to write it."""

    def __init__(self, sweep: str = "") -> None:
        self.sweep = sweep

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return float(value)
        except (TypeError, ValueError):
            several = _repeated(value, param, self.sweep)
            self.fail(f"{value!r}: expected a number, such as 3 or 1e-3{several}", param, ctx)


class NumberOrWord(click.ParamType[Any]):
    """Reads a number, or one of several words."""

    def __init__(self, number: click.ParamType[Any], words: tuple[str, ...]) -> None:
        self._number, self._words = number, words
        self.name = "|".join((number.name, *words))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._words else self._number.convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]
