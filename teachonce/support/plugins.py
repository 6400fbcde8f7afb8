"""Objects that other installed packages add by entry points, as codecs are added to zarr.

A package adds, for example, a codec by a table in its pyproject.toml:

    [project.entry-points."teachonce.codecs"]
    mine = "mypackage.codecs:MINE"
"""

from __future__ import annotations

from typing import Any

import click

from teachonce.support.errors import UserError, first_line


def added_object(group: str, name: str, option: str = "") -> Any | None:
    """Load the object that an installed package adds under a name; None if no package does.

    Call it for a name that is not built in: to look through all installed packages takes some 50
    ms. Raises UserError, which starts with the `option`, if the object cannot be loaded.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:  # a foreign module may raise any
            raise UserError(
                f"{option}{name}: {entry.value}, which an installed package adds to {group},"
                f" cannot be loaded ({first_line(error)}); update that package, or remove it"
            ) from error
    return None


def load_outside(word: str, group: str, option: str) -> Any | None:
    """Load `module:attribute`, or the object that an installed package adds under this name; None
    if no package does. Raises UserError, which starts with the `option`, if it cannot be loaded."""
    if ":" not in word:
        return added_object(group, word, f"{option} ")
    if not word.rpartition(":")[2].isidentifier():
        return None
    from importlib.metadata import EntryPoint

    try:
        return EntryPoint(word, word, group).load()
    except Exception as error:  # a foreign module may raise any
        raise UserError(f"{option} {word}: cannot be loaded ({first_line(error)})") from error


class NameOrAdded(click.Choice[str]):
    """One of the built-in names, or a name that an installed package adds to `group`."""

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
